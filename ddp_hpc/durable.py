"""Writing files so that a reader sees the whole new text or the whole old one."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ddp_hpc.errors import ConfigError


def fsync_path(path: Path) -> None:
    """Flush a file's data, or a directory's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make a directory, and those above it that are missing, for their owner and whoever may read their parent.

    Whatever the umask, nobody else may write to them: a run's own directory is made for its owner alone, and what is made
    in it takes after it.
    """
    if path.is_dir():
        return
    make_directories(path.parent)
    try:
        make_directory(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def make_directory(path: Path) -> None:
    """Make one directory, likewise.

    Raises:
        FileExistsError: where there is something of that name.
    """
    path.mkdir(mode=0o700 | readers(path.parent))


def open_private(path: Path, mode: str, *, buffering: int = -1) -> IO[Any]:
    """Open a file to write to; a new one may be read by those who may read its directory, and written by its owner."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, private_mode(path))

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering=buffering, encoding=encoding, opener=opener)


def private_mode(path: Path) -> int:
    """Return the mode of a new file at `path`: 0600, and readable for those whom its directory is shared with."""
    return 0o600 | readers(path.parent) & 0o444


def readers(folder: Path) -> int:
    """Return the bits by which group and others may read a directory."""
    return folder.stat().st_mode & 0o055


def replace_text(path: Path, text: str, *, durable: bool = True, is_secret: bool = False) -> None:
    """Put `text` at `path` by one rename; `durable` also waits for the disk; what is secret is for the owner alone.

    A leftover of a killed writer never blocks the next one: the name beside carries the writer's pid. A writer that
    fails (the disk is full) leaves none.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open_private(beside, "w") as file:
            if is_secret:
                with suppress(OSError):  # a file system without modes
                    os.fchmod(file.fileno(), 0o600)
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if durable:
        fsync_path(path.parent)


def delete_directory(path: Path) -> None:
    """Delete a directory, if nobody else does at this moment.

    It begins with a rename, so that nobody takes a half-deleted one for whole, to a name that is nobody else's.
    """
    away = path.with_name(f"{path.name}.{os.urandom(4).hex()}.deleted.tmp")
    with suppress(FileNotFoundError):
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


@contextmanager
def output_at(path: Path) -> Iterator[Path]:
    """Yield where to write what a user wants at `path`: beside it, to be renamed at the end, or a device or pipe itself.

    A link stays one; what it leads to is replaced.

    Raises:
        ConfigError: where there can be no such file.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"The output is {str(path)!r}, but there is no directory {str(path.parent)!r}. Make it.")
    if path.is_dir():
        raise ConfigError(f"The output is {str(path)!r}, but that is a directory. Name a file in it.")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        yield path
        return
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add one line in one write, and wait for the disk; a torn last line of a dead writer is closed first."""
    line = json.dumps(record, separators=(",", ":")) + "\n"
    with open_private(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: Path, *, on_odd: Callable[[str], object] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Yield the objects in the lines of `path`; a missing file has none.

    A line torn by a crash is passed over; `on_odd` is called with it, unless it is the last, which may be in the middle of
    being written. Zeros that a crash of a network file system left before a line are no part of it.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        whole = line.strip("\0 \t\r")
        if not whole:
            continue
        try:
            record = json.loads(whole)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            yield record
        elif number < len(lines):
            on_odd(whole)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object at `path`, or None where there is none yet."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None
