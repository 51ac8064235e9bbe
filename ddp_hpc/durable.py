"""Writing files so that a reader sees the whole new text or the whole old one."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp_hpc.errors import ConfigError


def fsync_path(path: Path) -> None:
    """Flush a file's data, or a directory's entries, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Put `text` at `path` by one rename; `durable` also waits for the disk.

    A leftover of a killed writer never blocks the next one: the name beside carries the writer's pid. A writer that
    fails (the disk is full) leaves none.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
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
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the whole lines of `path`; a missing file has none, a line torn by a crash is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object at `path`, or None where there is none yet."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None
