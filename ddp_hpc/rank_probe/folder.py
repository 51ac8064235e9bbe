"""The directory on a node's own disk in which the node's ranks have their sockets."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "ddp-hpc-"
_PLACES = ("/tmp", "/dev/shm")  # noqa: S108  `mkdtemp` makes a name that nobody could have taken, for this user only
"""Disks of a node, with paths short enough for a socket: 107 bytes (unix(7)). TMPDIR may be on a shared file system."""
_YOUNG_S = 60.0
"""A directory that was made this recently may not be locked yet."""


@dataclass(frozen=True)
class ProbeFolder:
    """A directory that only this user can enter; who has made it removes it."""

    path: Path
    lock_fd: int
    """Locked as long as the maker runs, or a process that it has forked: another one removes what is not locked."""

    def socket(self, rank: int) -> Path:
        """Return where this rank answers."""
        return socket_of(self.path, rank)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            os.close(self.lock_fd)


def socket_of(folder: Path, rank: int) -> Path:
    """Return where this rank answers."""
    return folder / f"rank-{rank}"


def make_folder(places: Sequence[str] = _PLACES) -> ProbeFolder | None:
    """Make a directory for the sockets of this node's ranks; None where no disk of this node can be written."""
    for place in places:
        _remove_leftovers(Path(place))
        with suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))  # with mode 0700
            # systemd-tmpfiles(8) does not clean a directory that is locked, either.
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return ProbeFolder(path, lock_fd)
    return None


def _remove_leftovers(place: Path) -> None:
    """Remove the directories of processes that were killed; those of other users stay."""
    with suppress(OSError):
        for path in place.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    found = path.lstat()
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_S:
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # A process id says nothing here: the maker may be in a container that has process ids of its own, and this `/tmp`.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(fd)
