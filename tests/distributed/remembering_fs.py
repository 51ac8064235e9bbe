"""A file system with the manners of a network's: what a mount has learnt of it, it believes for some seconds.

    python -m tests.distributed.remembering_fs SOURCE MOUNT_POINT SECONDS

It passes everything to the directory SOURCE. The kernel remembers attributes, names, and that names are missing. So two mounts of one
SOURCE are two nodes that share a file system; locks hold within one mount only. Needs root, libfuse2 and fusepy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import fuse

_ATTRIBUTES = (
    *("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks"),
    *("st_atime", "st_mtime", "st_ctime"),
)
_SPACE = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")


class Remembering(fuse.Operations):  # type: ignore[misc]  # it has no types
    """What the kernel asks, and the same of SOURCE; fusepy answers an OSError with its number."""

    def __init__(self, source: Path) -> None:
        self._source = source

    def __call__(self, operation: str, path: str, *more: Any) -> Any:
        return getattr(self, operation)(f"{self._source}{path}", *more)

    # --- names ---

    def getattr(self, path: str, _: object = None) -> dict[str, float]:
        found = os.lstat(path)
        return {name: getattr(found, name) for name in _ATTRIBUTES}

    def readdir(self, path: str, _: object) -> list[str]:
        return [".", "..", *(one.name for one in Path(path).iterdir())]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(path)
        return {name: getattr(found, name) for name in _SPACE}

    def rename(self, path: str, new: str) -> None:
        Path(path).rename(f"{self._source}{new}")

    def link(self, path: str, old: str) -> None:
        os.link(f"{self._source}{old}", path)

    def symlink(self, path: str, text: str) -> None:
        Path(path).symlink_to(text)

    def utimens(self, path: str, times: tuple[float, float] | None = None) -> None:
        os.utime(path, times, follow_symlinks=False)

    def truncate(self, path: str, size: int, _: object = None) -> None:
        os.truncate(path, size)

    chmod, chown = staticmethod(os.chmod), staticmethod(os.lchown)
    mkdir, rmdir = staticmethod(os.mkdir), staticmethod(os.rmdir)
    readlink, unlink = staticmethod(os.readlink), staticmethod(os.unlink)

    # --- open files ---

    def open(self, path: str, file: Any) -> None:
        file.fh = os.open(path, file.flags & ~(os.O_CREAT | os.O_EXCL))

    def create(self, path: str, mode: int, file: Any) -> None:
        file.fh = os.open(path, file.flags | os.O_CREAT, mode)

    def read(self, _: str, size: int, offset: int, file: Any) -> bytes:
        return os.pread(file.fh, size, offset)

    def write(self, _: str, data: bytes, offset: int, file: Any) -> int:
        return os.pwrite(file.fh, data, offset)  # at the end, of a file that was opened to append (Linux, pwrite(2))

    def fsync(self, _: str, __: int, file: Any) -> None:
        os.fsync(file.fh)

    def release(self, _: str, file: Any) -> None:
        os.close(file.fh)


if __name__ == "__main__":
    source, mount_point, seconds = sys.argv[1:]
    remembered = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), float(seconds))
    options = {"foreground": True, "raw_fi": True, "use_ino": True, "default_permissions": True}
    fuse.FUSE(Remembering(Path(source).resolve()), mount_point, **options, **remembered)
