"""The directory on a node's own disk in which the node's ranks have their sockets."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PREFIX = ".ddp-hpc-ranks-"
_MARK = ".ddp-hpc-ranks"
"""A file that says who has made the directory: another's directory may have a name of this kind."""
LINK = "tmp"
"""Where it is needed, a short way to the directory for temporary files."""
_ENTRY_PATTERN = re.compile(rf"{re.escape(_MARK)}|{LINK}|rank-\d+(?:\.deadline)?")
"""What is in such a directory; one with anything else stays as it is."""
_TMP_DIRS = ("/tmp", "/dev/shm")  # noqa: S108  `mkdtemp` makes a name that nobody could have taken, for this user only
"""Disks of a node, with paths short enough for a socket: 107 bytes (unix(7)). TMPDIR may be on a shared file system."""
_MOST_DEADLINE_BYTES = 16
"""A deadline has two numbers."""
_YOUNG_S = 60.0
"""A directory that was made this recently may not be locked yet."""


@dataclass(frozen=True)
class ProbeFolder:
    """A directory that only this user can enter; who has made it removes it."""

    path: Path
    lock_fd: int
    """Locked as long as the maker runs, or a process that it has forked: another one removes what is not locked."""

    def close(self) -> None:
        """Remove it, unless another program has put something into it."""
        with suppress(OSError):
            _remove(self.path, self.lock_fd)
        with suppress(OSError):
            os.close(self.lock_fd)


def socket_of(folder: Path, rank: int) -> Path:
    """Return where this rank answers."""
    return folder / f"rank-{rank}"


def make_folder(places: Sequence[str] = _TMP_DIRS) -> ProbeFolder | None:
    """Make a directory for the sockets of this node's ranks; None where no disk of this node can be written."""
    for place in places:
        with suppress(OSError):
            for left in Path(place).glob(f"{_PREFIX}*"):
                with suppress(OSError):
                    _remove_if_left(left)
        with suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))  # with mode 0700
            # systemd-tmpfiles(8) does not clean a directory that is locked, either.
            lock_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(OSError):  # a full disk: then it stays if its maker is killed
                os.close(os.open(_MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=lock_fd))
            return ProbeFolder(path, lock_fd)
    return None


def _remove_if_left(path: Path) -> None:
    """Remove the directory of a process that was killed; those of other users stay."""
    found = path.lstat()
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < _YOUNG_S:
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        # A process id says nothing here: the maker may be in a container that has process ids of its own, and this `/tmp`.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _MARK in os.listdir(fd):  # noqa: PTH208  of a descriptor: nobody can put another directory there meanwhile
            _remove(path, fd)
    finally:
        os.close(fd)


def _remove(path: Path, fd: int) -> None:
    """Remove this user's directory, open as `fd`, with the files that ranks make in it; never a file of another kind."""
    found = os.fstat(fd)
    names = sorted(os.listdir(fd), key=lambda name: name == _MARK)  # the mark goes last
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != stat.S_IRWXU:
        return
    if not all(_is_probe_file(name, fd) for name in names):
        return
    for name in names:
        os.unlink(name, dir_fd=fd)
    path.rmdir()  # it is empty, or it stays


def _is_probe_file(name: str, fd: int) -> bool:
    """Tell whether it is the mark, the link, a rank's socket, or a rank's deadline."""
    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
    is_small = stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_DEADLINE_BYTES
    is_kind = is_small or stat.S_IFMT(found.st_mode) in {stat.S_IFSOCK, stat.S_IFLNK}
    return _ENTRY_PATTERN.fullmatch(name) is not None and is_kind and found.st_uid == os.getuid()
