"""Which files below a directory are written, renamed and read, as it happens (inotify(7))."""

from __future__ import annotations

import ctypes
import os
import select
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_hpc.errors import ConfigError

_MODIFIED, _WRITTEN, _READ = 0x2, 0x8, 0x10
_MOVED_TO, _CREATED, _DELETED, _OVERFLOW, _FOLDER = 0x80, 0x100, 0x200, 0x4000, 0x40000000
_MASK = _MODIFIED | _WRITTEN | _READ | _MOVED_TO | _CREATED | _DELETED
_HEADER = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 16
Kind = Literal["begun", "done", "named", "read", "gone"]


@dataclass(frozen=True)
class FileEvent:
    """Something happened to a file."""

    kind: Kind
    """Its writing has begun or goes on; it was written to its end; it got this name; it was read; it was deleted."""
    path: Path


class FileEvents:
    """The events of all files below a directory, from now on; of those in it alone where it is not `deep`."""

    def __init__(self, root: Path, *, skipped: frozenset[str] = frozenset(), deep: bool = True) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise ConfigError(
                "The kernel gives this user no more inotify instances, so the script's files cannot be watched. Close other "
                "programs that watch files, or raise `fs.inotify.max_user_instances`."
            )
        self._folders: dict[int, Path] = {}
        self._skipped = skipped
        self._deep = deep
        for _ in self._add(root):
            pass

    def close(self) -> None:
        """Stop watching."""
        os.close(self._fd)

    def wait(self, timeout_s: float) -> list[FileEvent]:
        """Return what has happened; after `timeout_s` at the latest."""
        if not select.select([self._fd], [], [], timeout_s)[0]:
            return []
        events: list[FileEvent] = []
        with suppress(BlockingIOError):
            while data := os.read(self._fd, _BUFFER_BYTES):
                events.extend(self._parsed(data))
        return events

    def _parsed(self, data: bytes) -> Iterator[FileEvent]:
        start = 0
        while start < len(data):
            number, mask, _, length = _HEADER.unpack_from(data, start)
            name = data[start + _HEADER.size : start + _HEADER.size + length].rstrip(b"\0")
            start += _HEADER.size + length
            folder = self._folders.get(number)
            if folder is None or not name:
                continue
            path = folder / os.fsdecode(name)
            if mask & _FOLDER:
                if self._deep and mask & (_CREATED | _MOVED_TO):
                    yield from self._add(path)
                continue
            event = self._event(mask, path)
            if event is not None:
                yield event

    def _event(self, mask: int, path: Path) -> FileEvent | None:
        if mask & _READ:
            return FileEvent("read", path)
        if mask & (_CREATED | _MODIFIED):
            return FileEvent("begun", path)
        if mask & (_WRITTEN | _MOVED_TO):
            return FileEvent("named" if mask & _MOVED_TO else "done", path)
        return FileEvent("gone", path) if mask & _DELETED else None

    def _add(self, folder: Path) -> Iterator[FileEvent]:
        """Watch a directory and those in it; yield the files that are there already, which have no events of their own."""
        if folder.name in self._skipped:
            return
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), _MASK)
        if number < 0:
            return
        self._folders[number] = folder
        if not self._deep:
            return
        with suppress(OSError):
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    yield from self._add(path)
                else:
                    yield FileEvent("begun", path)
