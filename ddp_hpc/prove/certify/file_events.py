"""Which files below a directory are written, renamed and read, as it happens (inotify(7))."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.prove.certify.sandbox import LEFT_OUT
from ddp_hpc.prove.certify.saved_files import is_half_written

_MODIFIED, _WRITTEN, _READ = 0x2, 0x8, 0x10
_MOVED_FROM, _MOVED_TO, _CREATED, _DELETED, _FOLDER = 0x40, 0x80, 0x100, 0x200, 0x40000000
_CHANGES = _MODIFIED | _WRITTEN | _MOVED_FROM | _MOVED_TO | _CREATED | _DELETED
_HEADER = struct.Struct("iIII")
_BUFFER_BYTES = 1 << 16
Kind = Literal["begun", "done", "named", "read", "gone"]
"""A file's writing has begun or goes on; it was written to its end; it got this name; it was read; it was deleted or renamed."""
FileEvent = tuple[Kind, Path]
_KINDS: Mapping[int, Kind] = {
    _READ: "read",
    _CREATED | _MODIFIED: "begun",
    _MOVED_TO: "named",
    _WRITTEN: "done",
    _DELETED | _MOVED_FROM: "gone",
}
"""The first whose bits are set in an event's mask."""


class FileEvents:
    """The events of all files below directories, from now on."""

    def __init__(self, *roots: Path, only: Collection[Path] | None = None, apart_from: Collection[Path] = ()) -> None:
        """Watch directories without those that no script reads as data, and without `apart_from`.

        With `only`, watch nothing but changes at and below these paths, which may not be there yet; the roots lie above them.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise ConfigError(
                "The kernel gives this user no more inotify instances, so the script's files cannot be watched. Close other "
                "programs that watch files, or raise `fs.inotify.max_user_instances`."
            )
        self._folders: dict[int, Path] = {}
        self._found: dict[Path, tuple[int, int]] = {}
        """Files that were whole in a directory before it was watched: their sizes and times."""
        self._only = only
        self._apart_from = apart_from
        self._mask = _CHANGES | _READ if only is None else _CHANGES
        for root in roots:
            for _ in self._watch_folder(root):
                pass

    def close(self) -> None:
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
            if not self._concerns(path, is_folder=bool(mask & _FOLDER)):
                continue
            if mask & _FOLDER:
                if mask & (_CREATED | _MOVED_TO):
                    for file in self._watch_folder(path):
                        yield from self._events_before(file)
                elif mask & _MOVED_FROM and self._only is not None:
                    yield "gone", path
                continue
            kind = next((kind for bits, kind in _KINDS.items() if mask & bits), None)
            if kind is None or (kind != "read" and path in self._found and self._found[path] == _size_and_mtime(path)):
                continue  # of a writing that was over when the directory was found
            if kind != "read":
                self._found.pop(path, None)
            yield kind, path

    def _events_before(self, file: Path) -> Iterator[FileEvent]:
        """Yield what happened to a file before its new directory was watched; of its events, some may still come."""
        yield "begun", file
        if not is_half_written(file):
            self._found[file] = _size_and_mtime(file)
            yield "named", file

    def _concerns(self, path: Path, *, is_folder: bool) -> bool:
        """Tell whether a path is at or below one that is watched; a directory may also lie above one."""
        if any(path.is_relative_to(one) for one in self._apart_from):
            return False
        if self._only is None:
            return True
        return any(path.is_relative_to(one) or (is_folder and one.is_relative_to(path)) for one in self._only)

    def _watch_folder(self, folder: Path) -> Iterator[Path]:
        """Watch a directory and those in it; yield the files that are there already."""
        if folder.name in LEFT_OUT:
            return
        number = self._libc.inotify_add_watch(self._fd, os.fsencode(folder), self._mask)
        if number < 0 and ctypes.get_errno() == errno.ENOSPC:
            raise ConfigError(
                f"The kernel gives this user no more watches, so {folder} cannot be watched. Raise `fs.inotify.max_user_watches`, or "
                "certify the script with fewer directories: in its working directory, and below the paths that its command names."
            )
        if number < 0:  # the directory is gone, or may not be read
            return
        self._folders[number] = folder
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                path, is_folder = folder / entry.name, entry.is_dir(follow_symlinks=False)
                if not self._concerns(path, is_folder=is_folder):
                    continue
                if is_folder:
                    yield from self._watch_folder(path)
                else:
                    yield path


def _size_and_mtime(path: Path) -> tuple[int, int]:
    with suppress(OSError):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    return 0, 0
