"""Looking at a run again and again, at little cost to the file system that it lies on.

Whoever follows a run opens its files every `LOOK_INTERVAL_S`, and reads only what has changed since the look before.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ddp_hpc import processes
from ddp_hpc.ledger import Attempt, Ledger
from ddp_hpc.patience import patiently
from ddp_hpc.run_dir import RunDir

LOOK_INTERVAL_S = 2.0
"""From one look at a run's directory to the next, at least."""
SETTLED_S = 1.5
"""A file that has not changed for so long counts as read: clocks of file systems may be as coarse as a second."""

_NUM_COMPARED = 256
"""So many bytes before the newest line must be as they were, for a file to be the one that was read."""

Mark = tuple[int, int, int, int]
"""Inode, size, times of the last change of what is in the file and of what is known about it."""
T = TypeVar("T")


def mark(path: Path) -> Mark | None:
    """Return what differs once a file is written or replaced, or a directory gains or loses an entry; None without one.

    Raises:
        OSError: where the file system does not say.
    """
    # Opened first: NFS asks its server at open(2), and may answer a bare stat(2) from a cache that is up to a minute old
    # (nfs(5), "close-to-open cache consistency").
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _mark_of(fd)
    finally:
        os.close(fd)


def _mark_of(fd: int) -> Mark:
    found = os.fstat(fd)
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@dataclass
class _Known:
    mark: Mark | None
    since: float
    """When the mark was first seen."""
    read_at: float
    value: object


class LastRead:
    """What was last read of each path; a path is read again only where it has changed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[Path, _Known] = {}

    def read(self, path: Path, read: Callable[[], T]) -> T:
        """Return what `read` makes of `path`, now or when it last changed; errors are those of `read`."""
        try:
            seen, now = mark(path), self._clock()
        except OSError:  # a file system that does not answer: `read` says so in the words of its caller
            return read()
        known = self._known.get(path)
        if known is not None and known.mark == seen and known.read_at - known.since >= SETTLED_S:
            return cast("T", known.value)
        # A change in the same tick of the file system's clock as the one before leaves the mark as it was, so a file is read
        # once more when its mark has stood for a while. (Git's "racy" index entries are the same problem.)
        since = known.since if known is not None and known.mark == seen else now
        value = read()
        self._known[path] = _Known(seen, since, now, value)
        return value


def newest_attempt(run: RunDir, files: LastRead) -> Attempt | None:
    """Return the newest attempt of a run, read again only where the ledger has changed; None before the first.

    Raises:
        UnreadableError: where the file system has not answered for long.
    """
    return patiently(str(run.attempts), lambda: files.read(run.attempts, lambda: Ledger.read(run))).newest


class Tail:
    """The lines of a JSON file that grows, each returned once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset = 0, 0
        self._last = b""
        """What stands before the offset."""

    def new_lines(self) -> list[dict[str, Any]]:
        """Return the objects in the lines that were added since the last call; all of a file that was replaced or cut.

        A line that is not whole yet, as its end is missing, is left for the next call. Lines that are no objects are skipped.

        Raises:
            OSError: where the file system does not say.
        """
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            return []
        with stream:
            inode, size, *_ = _mark_of(stream.fileno())
            if inode == self._inode and size == self._offset:
                return []
            stream.seek(max(0, self._offset - len(self._last)))
            # A new file may get the inode of one that was deleted, and may have grown past the offset since.
            if inode != self._inode or stream.read(len(self._last)) != self._last:
                self._inode, self._offset, self._last = inode, 0, b""
                stream.seek(0)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._last = (self._last + whole)[-_NUM_COMPARED:]
        return [record for line in whole.split(b"\n") if (record := _object(line)) is not None]


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line.strip(b"\0 \t\r").decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def await_news(newest: Attempt | None) -> None:
    """Pause between two looks at a run.

    The pause ends early where the newest attempt's supervisor is a process of this host, and ends.
    """
    if newest is not None and newest.lives(socket.gethostname()):
        processes.await_exit(newest.pid, newest.pid_start, LOOK_INTERVAL_S)
    else:
        time.sleep(LOOK_INTERVAL_S)
