"""Write files so that a reader sees either the whole old text or the whole new one, also after a crash.

What fails is an OSError, with the file's name but in `fsync_path`. Where a run keeps a record, anything else than a file, or a file that is far too large,
is a NotARecordError.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from ddp_hpc.base.errors import ConfigError, NotARecordError

MOST_RECORD_BYTES = 64 << 20
"""Of a record that is read at once: ours are smaller."""
MOST_BYTES_OF_LINES = 2 << 30
"""Of a record that is read line by line."""
_LONG_NUMBER = re.compile(r"\d{19}")
_BLOCK = 1 << 20
_NO_FSYNC_ERRNOS = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP})
"""What CIFS and some FUSE file systems answer to an fsync of a directory."""
_LONGEST_LINE = 16 << 20
"""Bytes; our lines are shorter."""
_TYPE_NAMES = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def fsync_path(path: Path) -> None:
    """Flush a file's data, or a directory's entries, to disk (fsync(2)); go on where the file system cannot do so for directories."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FSYNC_ERRNOS or not path.is_dir():
            raise
        _warn_of_unflushed(error.strerror)
    finally:
        os.close(fd)


@cache
def _warn_of_unflushed(why: str) -> None:
    """Say it once in this process."""
    logging.getLogger(__name__).warning(
        "The file system of the run cannot flush directories to disk (%s), and ddp-hpc goes on without that. After a power cut of the "
        "file server, the newest files may be missing there; a run then resumes from an older checkpoint.",
        why,
    )


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
    path.mkdir(mode=0o700 | reader_bits(path.parent))


def open_private(path: Path, mode: str, *, buffering: int = -1, is_secret: bool = False) -> IO[Any]:
    """Open a file for writing. A new file is writable for its owner, and readable for those who may read its directory, unless `is_secret`."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600 if is_secret else new_file_mode(path))

    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering=buffering, encoding=encoding, opener=opener)


def new_file_mode(path: Path) -> int:
    """Return the mode of a new file at `path`: 0600, and readable for those who may read its directory."""
    return 0o600 | reader_bits(path.parent) & 0o444


def reader_bits(folder: Path) -> int:
    """Return the permission bits with which group and others may read a directory."""
    return folder.stat().st_mode & 0o055


def replace_text(
    path: Path, text: str | bytes, *, durable: bool = True, is_secret: bool = False, by_way_of: Path | None = None
) -> None:
    """Replace the file at `path` with `text`, atomically.

    With `durable`, wait until the text is on disk. With `is_secret`, only the owner may read it. The text is first written in
    the directory `by_way_of`, or else in that of `path`.
    """
    # Write beside, then rename: rename(2) replaces the old file in one step, so a reader never sees half of the new text.
    # fsync before the rename, else a crash may leave an empty file under the new name; fsync of the directory after it,
    # else the rename itself may be lost.
    beside = scratch_path((by_way_of or path.parent) / path.name)
    try:
        with name_errors(path), open_private(beside, "xb", is_secret=is_secret) as file:
            file.write(text.encode() if isinstance(text, str) else text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    if durable:
        with name_errors(path.parent):
            fsync_path(path.parent)


def scratch_path(path: Path) -> Path:
    """Return the path of a hidden file beside `path`, to be renamed to it. Nobody can guess the name, and put a link there."""
    return path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")


def delete_directory(path: Path) -> None:
    """Delete a directory, also if another process deletes it at the same time."""
    # Rename it first, so that no reader takes a half-deleted directory for a complete one. The random name is for this call
    # alone, so two processes cannot rename to the same name.
    away = path.with_name(f"{path.name}.{os.urandom(4).hex()}.deleted.tmp")
    with suppress(FileNotFoundError):
        path.rename(away)
        shutil.rmtree(away, ignore_errors=True)


@contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """Yield the path to write a user's output file to: a file beside `path`, which is renamed to it at the end.

    A device or pipe is written directly. Of a symbolic link, the target is replaced.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"The output file is {str(path)!r}, but the directory {str(path.parent)!r} does not exist. Create it first."
        )
    if path.is_dir():
        raise ConfigError(f"The output file is {str(path)!r}, but that is a directory. Give the path of a file in it.")
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with name_errors(path):
            yield path
        return
    with name_errors(path):
        target = Path(os.path.realpath(path))
    beside = scratch_path(target)
    try:
        with name_errors(path):
            yield beside
            beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Name a file in the errors of reading or writing it, where the system does not: read(2) and write(2) know no name."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def append_json_line(path: Path, record: Mapping[str, Any], *, durable: bool = True) -> None:
    """Add one line in one write. With `durable`, wait until it is on disk."""
    # A writer that was killed may have left the last line incomplete. End it first, so that ours is a line of its own.
    line = json.dumps(record, separators=(",", ":")) + "\n"
    with name_errors(path), open_private(path, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())


def open_record(path: Path, *, most_bytes: int | None = None) -> BufferedReader:
    """Open a file that a run has written, for reading. A pipe or a device in its place is refused, not waited for."""
    # Without O_NONBLOCK, open(2) of a pipe waits until somebody opens its other end. For files it changes nothing.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket, or a device without a driver
            raise
        raise _not_record_error(path, "a socket or a device") from error
    found = os.fstat(fd)
    try:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise _not_record_error(path, _TYPE_NAMES.get(stat.S_IFMT(found.st_mode), "something else"))
        if most_bytes is not None and found.st_size > most_bytes:
            raise NotARecordError(
                errno.EFBIG,
                f"it has {found.st_size / 1e6:,.0f} MB, and a record there has at most {most_bytes / 1e6:,.0f} MB",
                str(path),
            )
    except OSError:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def _not_record_error(path: Path, what: str) -> NotARecordError:
    return NotARecordError(errno.EINVAL, f"it is {what}, and ddp-hpc expects a file there", str(path))


def record_bytes(path: Path, *, most_bytes: int = MOST_RECORD_BYTES) -> bytes:
    """Return all that is in a file that a run has written."""
    try:
        return _read_whole_file(path, most_bytes)
    except OSError as error:
        # Another node has replaced the file since it was opened. NFS then knows no file by the old handle, but the new one
        # is there (https://nfs.sourceforge.net/#faq_a10).
        if error.errno != errno.ESTALE:
            raise
    return _read_whole_file(path, most_bytes)


def _read_whole_file(path: Path, most_bytes: int) -> bytes:
    with open_record(path, most_bytes=most_bytes) as file, name_errors(path):
        return file.read()


def read_end_of_file(path: Path, num_bytes: int) -> tuple[int, bytes]:
    """Return the last bytes of a file that a run has written, and where they begin in it."""
    with open_record(path) as file, name_errors(path):
        start = file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
        return start, file.read(num_bytes)


def record_text(path: Path) -> str:
    """Return all that is in a file that a run has written, as text; bytes that are no UTF-8 are replaced by a mark."""
    return record_bytes(path).decode("utf-8", errors="replace")


def numbers_in_names(folder: Path, pattern: re.Pattern[str]) -> list[int]:
    """Return the numbers in the names of a directory's entries that fit a pattern, in order; none where there is no directory."""
    try:
        names = [path.name for path in folder.iterdir()]  # not by `glob`, which takes an error for an empty directory
    except FileNotFoundError:
        return []
    return sorted(int(found[1]) for found in map(pattern.fullmatch, names) if found)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that a run has written, with their ends, but empty ones; none if the file does not exist."""
    try:
        file = open_record(path, most_bytes=MOST_BYTES_OF_LINES)
    except FileNotFoundError:
        return
    with file, name_errors(path):
        while raw := file.readline(_LONGEST_LINE):
            if raw != b"\n":
                yield raw


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield where each line of a file begins, and the line with its end, the last one first; raises what `lines_of` raises."""
    with open_record(path, most_bytes=MOST_BYTES_OF_LINES) as file, name_errors(path):
        begin, rest = file.seek(0, os.SEEK_END), b""
        while begin:
            begin, end = max(0, begin - _BLOCK), begin
            file.seek(begin)
            text = file.read(end - begin) + rest
            # What stands before the first line break belongs to a line that begins before this block.
            head = 0 if not begin or len(text) > _LONGEST_LINE else text.find(b"\n") + 1 or len(text)
            at, rest = begin + len(text), text[:head]
            for raw in reversed(text[head:].splitlines(keepends=True)):
                at -= len(raw)
                yield at, raw


def read_json_lines(path: Path, *, on_odd: Callable[[str], object] = lambda _: None) -> Iterator[dict[str, Any]]:
    """Yield the objects in the lines of a file; raises what `lines_of` raises.

    A line that a crash left incomplete is skipped. `on_odd` is called with it, unless it is the last line, which another
    process may be writing now. NUL bytes around a line, which a crashed network file system may leave, are removed.
    """
    for raw in lines_of(path):
        whole = raw.decode("utf-8", errors="replace").strip("\0 \t\r\n")
        record = json_object(whole)
        if record is not None:
            yield record
        elif whole and raw.endswith(b"\n"):
            on_odd(whole)


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object at `path`, or None if there is none yet; NUL bytes around it are removed."""
    try:
        return json_object(record_bytes(path).decode("utf-8").strip("\0 \t\r\n"))
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def read_line(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line of a file, or None if it holds none; NUL bytes around it are removed."""
    return json_object(raw.decode("utf-8", errors="replace").strip("\0 \t\r\n"))


def _parse_int64(digits: str) -> int:
    number = int(digits) if len(digits) <= 20 else 1 << 64
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(digits)
    return number


def json_object(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, or None if it is something else, or has a whole number of more than 64 bits."""
    try:
        record = json.loads(text, parse_int=_parse_int64 if _LONG_NUMBER.search(text) else None)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
