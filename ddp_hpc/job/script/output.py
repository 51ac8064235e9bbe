"""A rank's log, which holds all that its script prints; rank zero's is shown on the console, too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.durable import make_directories, private_mode

_CHUNK_BYTES = 1 << 16
_CONSOLE = 1


def open_log(path: Path) -> int:
    """Return a descriptor that adds to a rank's log."""
    make_directories(path.parent)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, private_mode(path))


def redirect(log_fd: int) -> None:
    """Have this process, and programs that it becomes, print to the log."""
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)


class Echo:
    """Copies what is added to a log to this process's standard output.

    The script writes to the file itself, not to a pipe of this process: a console that takes nothing does not stop it.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.lseek(self._fd, 0, os.SEEK_END)

    def copy(self) -> None:
        """Copy what was added since the last call."""
        with suppress(OSError):
            while chunk := os.read(self._fd, _CHUNK_BYTES):
                left = memoryview(chunk)
                while left:
                    left = left[os.write(_CONSOLE, left) :]
