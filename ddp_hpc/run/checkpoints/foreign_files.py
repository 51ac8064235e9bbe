"""Commits a directory of files that a script wrote, as the checkpoints of recipes are committed: flushed, listed, renamed.

Nothing is known of the files but their bytes. The manifest has their names, sizes and checksums, so that `verify`, `prune`,
`ddp-hpc checkpoints` and `status` know no difference.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

import ddp_hpc
from ddp_hpc.base.durable import fsync_path, make_directory, open_private, record_bytes
from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, NewerFormatError, NotARecordError
from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME, checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import (
    CHUNK_BYTES,
    FOREIGN_FILES_KEY,
    Manifest,
    check_sizes,
    commit_checkpoint,
    explain_if_fenced,
    make_uncommitted_dir,
    parse_manifest,
    read_manifest,
    set_checkpoint_aside,
    verify_checkpoint,
)
from ddp_hpc.run.checkpoints.shards import ShardRecord
from ddp_hpc.run.run_dir.paths import RunDir

_READ_BYTES = 1 << 20
_FICLONE = 0x40049409
"""ioctl(2): make a file of another one's blocks, which the file system copies where one of the two is written to."""


def step_in_name(folder: Path) -> int | None:
    """Return the number at the end of a directory's name: 500 of `checkpoint-500` and of `step_500.tmp`."""
    found = re.search(r"(\d+)$", folder.name.removesuffix(".tmp"))
    return int(found[1]) if found else None


def flush_files(folder: Path) -> None:
    """Flush to the disk what this host has written below a directory; each host that wrote does so before the commit."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with suppress(FileNotFoundError):  # another host's view: rank zero lists the files anew
            fsync_path(path)


def commit_files(  # noqa: PLR0913  # the run, its attempt and world, and what to commit
    run: RunDir, folder: Path, step: int, *, attempt: int, world_size: int, keeps_folder: bool = False
) -> Path:
    """Publish a directory's files as the checkpoint of `step`; return the new directory.

    The files move there, or with `keeps_folder` are copied there. A checkpoint of the same step is replaced.
    """
    _list_files(folder)
    if run.checkpoints.resolve().is_relative_to(folder):
        raise ConfigError(
            f"`commit` got {folder}, in which the committed checkpoints are. Write the files into a directory below it, such as `step-{step}.tmp`."
        )
    _refuse_foreign_manifest(folder)
    uncommitted = make_uncommitted_dir(run, step, attempt)
    shutil.rmtree(uncommitted)  # what a failed commit of this attempt may have left
    try:
        (_copy_tree if keeps_folder else _move_folder)(folder, uncommitted)
        return _publish(run, uncommitted, step, attempt, world_size)
    except BaseException:
        if keeps_folder:  # on a full disk, half a copy would keep the next one from fitting
            shutil.rmtree(uncommitted, ignore_errors=True)
        raise


def _publish(run: RunDir, uncommitted: Path, step: int, attempt: int, world_size: int) -> Path:
    (uncommitted / MANIFEST_NAME).unlink(missing_ok=True)  # of a directory that was committed before
    shards = tuple(_flush_and_record(path, uncommitted) for path in _list_files(uncommitted))
    for directory in [path for path in uncommitted.rglob("*") if path.is_dir()]:
        fsync_path(directory)
    made = {"at": time.time(), "attempt": attempt, "ddp_hpc": ddp_hpc.__version__}
    manifest = Manifest(step=step, world_size=world_size, shards=shards, state={FOREIGN_FILES_KEY: True}, made=made)
    return commit_checkpoint(run, uncommitted, manifest, keeps_replaced=False)


def newest_whole_step(run: RunDir, *, reads_all: bool, on_progress: Callable[[], object] = lambda: None) -> int | None:
    """Return the newest step with a committed checkpoint that is whole; one that is not is renamed, and the one before counts.

    With `reads_all`, every byte is compared with its checksum, else only the files' sizes. `on_progress` is called for each chunk.
    """
    for step in reversed(committed_steps(run)):
        path = checkpoint_path(run, step)
        try:
            if reads_all:
                verify_checkpoint(path, on_progress)
            else:
                check_sizes(path, read_manifest(path))
        except CorruptCheckpointError:
            set_checkpoint_aside(path)
        else:
            return step
    return None


def _list_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(
            f"`commit` was asked to commit {str(folder)!r}, but there is no such directory. Write the files into it first."
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise ConfigError(f"`commit` was asked to commit {str(folder)!r}, but it holds no file. Write the files first.")
    return files


def _refuse_foreign_manifest(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        return
    try:
        parse_manifest(record_bytes(path), folder)
    except NewerFormatError:
        return
    except (CorruptCheckpointError, RecursionError, FileNotFoundError, IsADirectoryError, NotARecordError) as error:
        raise ConfigError(
            f"`commit` was asked to commit {str(folder)!r}, but {str(path)!r} is not what ddp-hpc has written, or it is damaged. The "
            f"name {MANIFEST_NAME} at the top of a committed folder is ddp-hpc's own. Name your file otherwise, or put it into a subfolder. "
            "Nothing was changed."
        ) from error


def _move_folder(folder: Path, uncommitted: Path) -> None:
    try:
        with explain_if_fenced(uncommitted):
            folder.rename(uncommitted)
    except OSError as error:
        raise ConfigError(
            f"`commit` cannot rename {str(folder)!r} to {str(uncommitted)!r} ({error.strerror}). Write the files below "
            "`run.checkpoint_dir`, so that both are on one file system."
        ) from error


def _copy_tree(folder: Path, uncommitted: Path) -> None:
    with explain_if_fenced(uncommitted):
        make_directory(uncommitted)
        for path in sorted(folder.rglob("*")):
            target = uncommitted / path.relative_to(folder)
            if path.is_dir():
                make_directory(target)
            elif path.is_symlink():
                try:
                    os.link(path, target, follow_symlinks=False)
                except OSError:  # another file system, or one without links
                    _copy_file(path, target)
            elif path.is_file():
                _copy_file(path, target)


def _copy_file(path: Path, target: Path) -> None:
    """Copy a file; `_flush_and_record` flushes it."""
    # Not a hard link: scripts write their next save into the same file (`torch.save` truncates it), which is every link's file.
    mode = stat.S_IMODE(path.stat().st_mode) | stat.S_IRUSR
    if not _try_reflink(path, target):
        shutil.copyfile(path, target)
    with suppress(OSError):  # a file system without permissions
        target.chmod(mode)


def _try_reflink(path: Path, target: Path) -> bool:
    """Make a new file, of another one's blocks where the file system can share them; else tell that it is empty."""
    with path.open("rb") as source, open_private(target, "xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, source.fileno())
        except OSError:
            return False
    return True


def _flush_and_record(path: Path, folder: Path) -> ShardRecord:
    """Flush a file, and return what a reader compares it with."""
    checksums: list[str] = []
    checksum, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        while some := file.read(min(_READ_BYTES, CHUNK_BYTES - size % CHUNK_BYTES)):
            checksum.update(some)
            size += len(some)
            if size % CHUNK_BYTES == 0:
                checksums.append(checksum.hexdigest())
                checksum.reset()
    if size % CHUNK_BYTES or not size:
        checksums.append(checksum.hexdigest())
    return ShardRecord(str(path.relative_to(folder)), size, 0, CHUNK_BYTES, tuple(checksums))
