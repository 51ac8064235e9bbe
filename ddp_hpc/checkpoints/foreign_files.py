"""Commits a directory of files that a script wrote, as the checkpoints of recipes are committed: flushed, listed, renamed.

Nothing is known of the files but their bytes. The manifest has their names, sizes and checksums, so that `verify`, `prune`,
`ddp-hpc checkpoints` and `status` know no difference.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import closing, suppress
from pathlib import Path

import xxhash

import ddp_hpc
from ddp_hpc.base.durable import delete_directory, fsync_path, make_directory
from ddp_hpc.checkpoints.checkpoint_names import MANIFEST, checkpoint_path, committed_steps
from ddp_hpc.checkpoints.checkpoint_store import (
    CHUNK_BYTES,
    FOREIGN,
    ChunkReader,
    Manifest,
    check_sizes,
    commit,
    make_uncommitted,
    read_manifest,
    set_aside,
)
from ddp_hpc.checkpoints.shards import ShardRecord
from ddp_hpc.errors import ConfigError, CorruptCheckpointError, FencedError
from ddp_hpc.run_dir.paths import RunDir

_READ_BYTES = 1 << 20


def step_of(folder: Path) -> int | None:
    """Return the number at the end of a directory's name: 500 of `checkpoint-500` and of `step_500.tmp`."""
    found = re.search(r"(\d+)$", folder.name.removesuffix(".tmp"))
    return int(found[1]) if found else None


def flush_files(folder: Path) -> None:
    """Flush to the disk what this host has written below a directory; each host that wrote does so before the commit.

    Raises:
        ConfigError: where there is no such directory, or it holds no file.
    """
    for path in _files(folder):
        with suppress(FileNotFoundError):  # another host's view: rank zero lists the files anew
            fsync_path(path)


def commit_files(  # noqa: PLR0913  # the run, its attempt and world, and what to commit
    run: RunDir, folder: Path, step: int, *, attempt: int, world_size: int, keeps_folder: bool = False
) -> Path:
    """Publish a directory's files as the checkpoint of `step`; return the new directory.

    The files move there, or with `keeps_folder` are linked there. A checkpoint of the same step is replaced.

    Raises:
        ConfigError: where there is nothing to commit, or it lies on another file system.
        FencedError: if another attempt has claimed the run.
    """
    _files(folder)
    uncommitted = make_uncommitted(run, step, attempt)
    shutil.rmtree(uncommitted)  # what a failed commit of this attempt may have left
    if keeps_folder:
        _link_tree(folder, uncommitted)
    else:
        _move(folder, uncommitted)
    with suppress(FileNotFoundError):
        (uncommitted / MANIFEST).unlink()  # of a directory that was committed before
    shards = tuple(_record(path, uncommitted) for path in _files(uncommitted))
    for directory in [path for path in uncommitted.rglob("*") if path.is_dir()]:
        fsync_path(directory)
    made = {"at": time.time(), "attempt": attempt, "ddp_hpc": ddp_hpc.__version__}
    manifest = Manifest(step=step, world_size=world_size, shards=shards, state={FOREIGN: True}, made=made)
    target = checkpoint_path(run, step)
    if target.exists():  # the newest save of a step counts, as with `os.replace`
        delete_directory(target)
    return commit(run, uncommitted, manifest)


def newest(run: RunDir, *, reads_all: bool) -> int | None:
    """Return the newest step with a committed checkpoint that is whole; one that is not is renamed, and the one before counts.

    With `reads_all`, every byte is compared with its checksum, else only the files' sizes.

    Raises:
        UnreadableError: if the file system does not answer.
    """
    for step in reversed(committed_steps(run)):
        path = checkpoint_path(run, step)
        try:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
            for record in manifest.shards if reads_all else ():
                _verify(path / record.file, record)
        except CorruptCheckpointError:
            set_aside(path)
        else:
            return step
    return None


def _verify(path: Path, record: ShardRecord) -> None:
    """Compare a file, which may be larger than memory, with its checksums."""
    buffer = memoryview(bytearray(min(record.size, record.chunk_bytes)))
    with closing(ChunkReader(path, record)) as reader:
        for number in range(len(record.chunks)):
            reader.read(number, buffer[: record.size - number * record.chunk_bytes])


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise ConfigError(
            f"`commit` was asked to commit {str(folder)!r}, but there is no such directory. Write the files into it first."
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise ConfigError(f"`commit` was asked to commit {str(folder)!r}, but it holds no file. Write the files first.")
    return files


def _move(folder: Path, uncommitted: Path) -> None:
    try:
        folder.rename(uncommitted)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not uncommitted.parent.is_dir():
            raise FencedError(
                f"A newer attempt has taken over the run, so {str(folder)!r} is not committed. You need do nothing: the newer "
                "attempt goes on from the checkpoint before."
            ) from error
        raise ConfigError(
            f"`commit` cannot rename {str(folder)!r} to {str(uncommitted)!r} ({error.strerror}). Write the files below "
            "`run.checkpoint_dir`, so that both are on one file system."
        ) from error


def _link_tree(folder: Path, uncommitted: Path) -> None:
    make_directory(uncommitted)
    for path in sorted(folder.rglob("*")):
        target = uncommitted / path.relative_to(folder)
        if path.is_dir():
            make_directory(target)
            continue
        try:
            os.link(path, target)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, target)


def _record(path: Path, folder: Path) -> ShardRecord:
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
