"""Whether other users decide what is in a run's directory."""

from __future__ import annotations

import os
import pwd
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir.paths import RunDir

_WRITABLE = 0o022
"""By the group, or by others."""


def refuse_strangers(path: Path) -> None:
    """Refuse a run directory that another user owns or may write to: that user could replace the code that you then run.

    Or name jobs and processes of yours in it, which a command would then end.
    """
    found = path.stat()
    if found.st_uid != os.geteuid() and found.st_uid != _owner_of_new(path.parent):
        raise ConfigError(
            f"The run's directory {path} belongs to {_user(found.st_uid)}, and its owner could change the code that you "
            "would run, and the jobs and processes that you would end. Start a run of your own with `name=...` or `runs_dir=...`."
        )
    places = [path, *_inner(path)] if found.st_mode & 0o011 else [path]  # else no other user can enter the directory
    open_ones = [place for place in places if place.lstat().st_mode & _WRITABLE and not place.is_symlink()]
    if open_ones and not _knows_no_modes(path.parent):
        raise ConfigError(
            f"Other users may write to {', '.join(map(str, open_ones))}, and could change the code that you would run. "
            f"Remove their write permission with `chmod -R go-w {shlex.quote(str(path))}`, and try again."
        )


def _inner(path: Path) -> Iterator[Path]:
    """Yield the files and directories of a run that determine which code runs."""
    run = RunDir(path)
    yield from (place for place in (run.config, run.job_script, run.snapshots, run.checkpoints) if place.exists())


def _owner_of_new(folder: Path) -> int | None:
    """Return the owner of a file that this process makes in a directory: file systems may map users (NFS), or know only one (SMB, FUSE)."""
    probe = _probe(folder)
    return probe and probe.st_uid


def _knows_no_modes(folder: Path) -> bool:
    """Return whether others may write to a private file that this process makes here, as on file systems without modes."""
    probe = _probe(folder)
    return probe is not None and bool(probe.st_mode & _WRITABLE)


def _probe(folder: Path) -> os.stat_result | None:
    """Make a private directory in `folder`, and return its status; None where this process may not make one."""
    with suppress(OSError), tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=folder) as made:
        return Path(made).stat()
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
