"""Whether other users decide what is in a run's directory."""

from __future__ import annotations

import os
import pwd
import shlex
import tempfile
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir.paths import RunDir

_WRITABLE_BITS = 0o022
"""By the group, or by others."""


def refuse_strangers_dir(path: Path) -> None:
    """Refuse a run directory that another user owns or may write to: that user could replace the code that you then run.

    Or name jobs and processes of yours in it, which a command would then end.
    """
    run, found = RunDir(path), path.stat()
    # File systems may map users (NFS), or know only one (SMB, FUSE): then what this process makes has another owner, too.
    if found.st_uid != os.geteuid() and ((own := _stat_of_probe(path.parent)) is None or own.st_uid != found.st_uid):
        try:
            owner = pwd.getpwuid(found.st_uid).pw_name
        except KeyError:
            owner = f"user {found.st_uid}"
        raise ConfigError(
            f"The run's directory {path} belongs to {owner}, and its owner could change the code that you "
            "would run, and the jobs and processes that you would end. Start a run of your own with `name=...` or `runs_dir=...`."
        )
    places = [path]
    if found.st_mode & 0o011:  # else no other user can enter the directory; these determine which code runs
        places += [place for place in (run.config, run.job_script, run.snapshots, run.checkpoints) if place.exists()]
    open_ones = [place for place in places if place.lstat().st_mode & _WRITABLE_BITS and not place.is_symlink()]
    # A file system without modes shows a private directory, too, as one that others may write to.
    if open_ones and ((own := _stat_of_probe(path.parent)) is None or not own.st_mode & _WRITABLE_BITS):
        raise ConfigError(
            f"Other users may write to {', '.join(map(str, open_ones))}, and could change the code that you would run. "
            f"Remove their write permission with `chmod -R go-w {shlex.quote(str(path))}`, and try again."
        )


def _stat_of_probe(folder: Path) -> os.stat_result | None:
    """Make a private directory in `folder`, and return its status; None where this process may not make one."""
    with suppress(OSError), tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=folder) as made:
        return Path(made).stat()
    return None
