"""Write files so that a reader sees either the whole old text or the whole new one, also after a crash."""

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
    """Flush a file's data, or a directory's entries, to disk (fsync(2))."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: Path) -> None:
    """Make a directory and its missing parents. Only the owner may write; others may read if they may read the parent.

    This does not depend on the umask. A run's own directory is for its owner alone, and so is all that is made in it.
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
    """Make one directory, with the same permissions.

    Raises:
        FileExistsError: if the name exists.
    """
    path.mkdir(mode=0o700 | readers(path.parent))


def open_private(path: Path, mode: str, *, buffering: int = -1) -> IO[Any]:
    """Open a file for writing. A new file is writable for its owner, and readable for those who may read its directory."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, private_mode(path))

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering=buffering, encoding=encoding, opener=opener)


def private_mode(path: Path) -> int:
    """Return the mode of a new file at `path`: 0600, and readable for those who may read its directory."""
    return 0o600 | readers(path.parent) & 0o444


def readers(folder: Path) -> int:
    """Return the permission bits with which group and others may read a directory."""
    return folder.stat().st_mode & 0o055


def replace_text(path: Path, text: str, *, durable: bool = True, is_secret: bool = False) -> None:
    """Replace the file at `path` with `text`, atomically.

    With `durable`, wait until the text is on disk. With `is_secret`, only the owner may read it.
    """
    # Write beside, then rename: rename(2) replaces the old file in one step, so a reader never sees half of the new text.
    # fsync before the rename, else a crash may leave an empty file under the new name; fsync of the directory after it,
    # else the rename itself may be lost. The pid in the name keeps the leftover of a killed writer out of our way.
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open_private(beside, "w") as file:
            if is_secret:
                with suppress(OSError):  # a file system without permissions
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
    """Delete a directory, also if another process deletes it at the same time."""
    # Rename it first, so that no reader takes a half-deleted directory for a complete one. The random name is for this call
    # alone, so two processes cannot rename to the same name.
    away = path.with_name(f"{path.name}.{os.urandom(4).hex()}.deleted.tmp")
    with suppress(FileNotFoundError):
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


@contextmanager
def output_at(path: Path) -> Iterator[Path]:
    """Yield the path to write a user's output file to: a file beside `path`, which is renamed to it at the end.

    A device or pipe is written directly. Of a symbolic link, the target is replaced.

    Raises:
        ConfigError: if `path` is a directory, or its directory does not exist.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"The output file is {str(path)!r}, but the directory {str(path.parent)!r} does not exist. Create it first."
        )
    if path.is_dir():
        raise ConfigError(f"The output file is {str(path)!r}, but that is a directory. Give the path of a file in it.")
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


def append_json_line(path: Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    """Add one line in one write. With `durable`, wait until it is on disk."""
    # A writer that was killed may have left the last line incomplete. End it first, so that ours is a line of its own.
    line = json.dumps(record, separators=(",", ":")) + "\n"
    with open_private(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())


def read_json_lines(path: Path, *, on_odd: Callable[[str], object] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Yield the objects in the lines of `path`; none if the file does not exist.

    A line that a crash left incomplete is skipped. `on_odd` is called with it, unless it is the last line, which another
    process may be writing now. NUL bytes around a line, which a crashed network file system may leave, are removed.
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
    """Return the JSON object at `path`, or None if there is none yet."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None
