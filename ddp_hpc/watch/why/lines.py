"""Reads the ends of logs as clean lines: without colours, progress bars, boxes and the prefixes that launchers add."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.base.durable import open_record, read_end_of_file
from ddp_hpc.base.patience import ask_once

TAIL_BYTES = 256 << 10
"""How much of the end of each log is read."""
_MOST_COUNTED_BYTES = 64 << 20
_LONGEST = 2000
"""Characters of a line that are kept."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_SIDE, _BOX, _BOX_AND_LINE = "\N{BOX DRAWINGS LIGHT VERTICAL}", frozenset("╭╮╰╯┌┐└┘│"), "╭╮╰╯┌┐└┘─ "
_PREFIX = re.compile(r"(?:\[(?:rank|default)\d+\]:? ?|\[[\w.@-]+,\d+\]<std(?:out|err)>: ?)+")
"""What PyTorch (`[rank1]: `), torchrun (`[default1]:`) and `mpirun --tag-output` (`[1,3]<stderr>:`) write before a line."""


@dataclass(frozen=True)
class LogLine:
    """A line of a log."""

    path: Path
    offset: int
    """Of its first byte in the file."""
    text: str
    """Clean, without the prefix."""


def clean(raw: str) -> str:
    """Return a line as it stands on a terminal in the end, without colours, control characters, prefix, and rich's box around it."""
    text = _ESCAPES.sub("", raw).rstrip("\r\n").rpartition("\r")[2]
    text = _CONTROL.sub("", text)[:_LONGEST].rstrip()
    prefix = _PREFIX.match(text)
    text = text[prefix.end() :] if prefix else text
    inner = text.lstrip()
    if inner[:1] not in _BOX or inner[-1:] not in _BOX:
        return text
    indent = text[: len(text) - len(inner)]
    return indent + (inner[1:-1].rstrip() if inner[0] == _SIDE else inner.strip(_BOX_AND_LINE))


def tail(path: Path, num_bytes: int = TAIL_BYTES) -> Sequence[LogLine]:
    """Return the whole lines at the end of a log, as they stand on a terminal; none where it cannot be read."""

    def read() -> tuple[int, bytes]:
        try:
            return read_end_of_file(path, num_bytes)
        except FileNotFoundError:
            return 0, b""

    start, data = ask_once(path, read, unknown=(0, b""))
    lines, offset = [], start
    for raw in data.split(b"\n"):
        lines.append(LogLine(path, offset, clean(raw.decode("utf-8", errors="replace"))))
        offset += len(raw) + 1
    # Of progress bars in one line, `clean` keeps the last one.
    is_cut = start and b"\r" not in data.partition(b"\n")[0][:-1]
    return lines[1 if is_cut else 0 : None if lines[-1].text else -1]


def number_of(line: LogLine) -> int | None:
    """Return a line's number in its file, from 1 on; None where the file is too large to count."""
    if line.offset > _MOST_COUNTED_BYTES:
        return None

    def count() -> int | None:
        with open_record(line.path) as file:
            return file.read(line.offset).count(b"\n") + 1

    return ask_once(line.path, count, unknown=None)
