"""Poll a run's files at little cost for the file system.

A command that follows a run opens its files every `LOOK_INTERVAL_S`, and reads only what changed since the last time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from ddp_hpc.base import processes
from ddp_hpc.base.durable import open_record, read_line
from ddp_hpc.base.patience import ask_once, await_answer
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import failed_save, read_progress

LOOK_INTERVAL_S = 2.0
"""The shortest time between two polls of a run directory."""
SETTLED_S = 1.5
"""A file is read once more after it has been unchanged for this long: clocks of file systems may tick once a second."""

_NUM_SPREAD_PARTS = 64
"""How many parts of a long file are read, besides its end."""
_COMPARED_BYTES = 256
"""How many bytes before the newest line are compared, to know whether it is still the same file."""

FileMark = tuple[int, int, int, int]
"""Inode, size, modification time, status change time."""
T = TypeVar("T")


def file_mark(path: Path) -> FileMark | None:
    """Return what changes if a file is written or replaced, or a directory's entries change; None if it does not exist."""
    # Open it first: NFS asks its server at open(2), but may answer stat(2) alone from a cache that is up to a minute old
    # (nfs(5), "close-to-open cache consistency").
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _mark_of_open_file(fd)
    finally:
        os.close(fd)


def _mark_of_open_file(fd: int) -> FileMark:
    found = os.fstat(fd)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class ReadCache:
    """What was last read from each path; a path is read again only if it changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[Path, tuple[FileMark | None, float, float, object]] = {}
        """By path: its mark, when that was first seen, when the path was read, and what was read."""

    def read(self, path: Path, read: Callable[[], T]) -> T:
        """Return the result of `read`, which reads `path`; call it again only if `path` changed. Errors are those of `read`."""
        try:
            seen, now = file_mark(path), self._clock()
        except OSError:  # the file system does not answer: let `read` raise the error, with its own message
            return read()
        before, since, read_at, value = self._known.get(path, (None, now, now, None))
        if path not in self._known or before != seen:
            since = read_at = now
        elif read_at - since >= SETTLED_S:
            return cast("T", value)
        # Two changes within one tick of the file system's clock leave the same mark. So a file is read once more after its
        # mark was unchanged for a while. (Git's "racy" index entries are the same problem.)
        found = read()
        self._known[path] = (seen, since, now, found)
        return found


def newest_attempt(run: RunDir, files: ReadCache) -> Attempt | None:
    """Return the newest attempt of a run, or None before the first; the ledger is read only if it changed."""
    return await_answer(str(run.attempts), lambda: files.read(run.attempts, lambda: Ledger.read(run))).newest


class Tail:
    """The lines of a growing file of JSON lines, each returned once.

    With `most_bytes`, no more than that is read of what the file has at first: its end, and evenly spaced parts before it.
    """

    def __init__(self, path: Path, *, most_bytes: int | None = None) -> None:
        self._path = path
        self._most_bytes = most_bytes
        self._inode, self._offset = 0, 0
        self._last = b""
        """The last bytes before the offset."""

    def new_records(self) -> Iterator[dict[str, Any]]:
        """Return, one after the other, the objects in the lines added since the last call; all lines if the file was replaced or truncated.

        A line without its line break is left for the next call. Lines that are not JSON objects are skipped.
        """
        return (record for line in self.new_raw_lines() if (record := read_line(line)) is not None)

    def new_raw_lines(self) -> list[bytes]:
        """Return these lines as they stand in the file, empty ones among them."""
        try:
            stream = open_record(self._path)
        except FileNotFoundError:
            return []
        with stream:
            inode, size, *_ = _mark_of_open_file(stream.fileno())
            if inode == self._inode and size == self._offset:
                return []
            stream.seek(max(0, self._offset - len(self._last)))
            # A new file may have the inode of a deleted one, and may already be longer than the offset.
            if inode != self._inode or stream.read(len(self._last)) != self._last:
                self._inode, self._offset, self._last = inode, 0, b""
                stream.seek(0)
            parts, begin = [], self._offset
            if begin == 0 and self._most_bytes is not None and size > self._most_bytes:
                begin = size - self._most_bytes // 2
                parts = _spread_lines(stream, begin, self._most_bytes // 2)
                stream.seek(begin)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset = begin + len(whole)
        self._last = (self._last + whole)[-_COMPARED_BYTES:]
        if parts:
            whole = b"\n".join([*parts, whole.partition(b"\n")[2]])
        return whole.split(b"\n")


def _spread_lines(stream: BinaryIO, end: int, num_bytes: int) -> list[bytes]:
    """Return evenly spaced parts of a file before `end`, of whole lines, which have `num_bytes` or less together."""
    length = num_bytes // _NUM_SPREAD_PARTS
    parts = []
    for number in range(_NUM_SPREAD_PARTS):
        begin = (end - length) * number // _NUM_SPREAD_PARTS
        stream.seek(begin)
        part = stream.read(length)
        first = part.find(b"\n") + 1 if begin else 0
        parts.append(part[first : part.rfind(b"\n") + 1])
    return parts


class SaveWatch:
    """Warns on standard error, while a command waits for a run, when its saves begin to fail, from one attempt on."""

    def __init__(self, run: RunDir, attempt: int, files: ReadCache) -> None:
        self._run, self._attempt, self._files = run, attempt, files
        self._is_failing = False

    def warn_of_failures(self) -> None:
        path = self._run.progress
        progress = ask_once(path, lambda: self._files.read(path, lambda: read_progress(self._run)), unknown=None)
        error = progress.save_error if progress is not None and progress.attempt >= self._attempt else None
        if error and not self._is_failing:
            sys.stderr.write(f"warning: {self._run.name}: {failed_save(error)}\n")
        self._is_failing = bool(error)


def await_next_poll(newest: Attempt | None) -> None:
    """Wait until the next poll of a run.

    The wait ends early if the newest attempt's supervisor is a process of this host, and exits.
    """
    if newest is not None and newest.is_alive_on(processes.host_name()):
        processes.await_exit(newest.pid, newest.pid_start, LOOK_INTERVAL_S)
    else:
        time.sleep(LOOK_INTERVAL_S)
