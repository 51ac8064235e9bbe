"""Records: dataclasses that are kept as JSON objects, in a file of their own or one a line.

What is read has the types that its class names. Keys that the class does not have are left out, since another version may have
written them; None stands for a missing file, for damage, and for a record of another kind. Errors are those of `durable`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ddp_hpc.base.durable import append_json_line, lines_of, make_directories, read_line, record_bytes, replace_text
from ddp_hpc.base.patience import ask_once

T = TypeVar("T")
_LONG_NUMBER = re.compile(rb"\d{19}")


def write_record(
    path: Path, record: Any, *, durable: bool = True, is_secret: bool = False, indent: int | None = None
) -> None:
    """Replace the record at a path, also one that is a mapping; a reader sees the old or the new one, whole."""
    make_directories(path.parent)
    content = record if isinstance(record, Mapping) else asdict(record)
    replace_text(path, json.dumps(content, indent=indent), durable=durable, is_secret=is_secret)


def append_record(path: Path, record: Any, *, durable: bool = True) -> None:
    """Add one record as a line."""
    append_json_line(path, asdict(record), durable=durable)


def read_record(path: Path, kind: type[T], *, may_have_nan: bool = False) -> T | None:
    """Return the record at a path."""
    try:
        return decode_record(record_bytes(path), kind, may_have_nan=may_have_nan)
    except FileNotFoundError:
        return None


def try_read_record(path: Path, kind: type[T], *, may_have_nan: bool = False) -> T | None:
    """Return the record at a path; None, too, where the file system does not answer, which is logged."""
    return ask_once(path, partial(read_record, path, kind, may_have_nan=may_have_nan), unknown=None)


def read_records(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the records in the lines of a file; none without one. A line that is half written is skipped."""
    for line in lines_of(path):
        if (record := decode_record(line, kind)) is not None:
            yield record


def decode_record(raw: bytes, kind: type[T], *, may_have_nan: bool = False) -> T | None:
    """Return the record that some JSON holds. NUL bytes around it are removed, as crashed file systems leave them.

    NaN and infinite numbers, which Python writes and JSON does not have, count as damage unless the record `may_have_nan`. So do
    whole numbers of more than 64 bits.
    """
    if _LONG_NUMBER.search(raw) and read_line(raw) is None:
        return None
    try:
        record: T = _decoder_of(kind)(raw.strip(b"\0 \t\r\n"))  # type: ignore[arg-type]  # a class is hashable
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return convert_to_record(read_line(raw), kind) if may_have_nan else None
    return record


def convert_to_record(value: Any, kind: type[T]) -> T | None:
    """Return the record that a value of JSON is, such as `{"step": 1}`."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError):
        return None


@cache
def _decoder_of(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.json.Decoder(kind).decode
