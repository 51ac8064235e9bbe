"""By which values, lines and files two runs differ. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ddp_hpc.prove.certify.output_lines import parse
from ddp_hpc.prove.certify.saved_files import Contents

NO_FILE = "no such file"
_LOGS = frozenset({".log", ".out", ".err"})
_TIME_OF_DAY = re.compile(r"\d\d:\d\d:\d\d")
_FIRST_FIELD = re.compile(r"\s*(\d+)\s*[,;\t ]")


@dataclass(frozen=True)
class Difference:
    """A value that differs from the undisturbed run's."""

    file: str
    path: str
    """Of the value in the file; a line's number in a text; empty for a whole file."""
    here: str
    undisturbed: str


def differences(here: Mapping[str, Contents], undisturbed: Mapping[str, Contents]) -> list[Difference]:
    """Return the values by which the files of two runs differ."""
    found: list[Difference] = []
    for file in sorted({*here, *undisturbed}):
        mine, other = here.get(file), undisturbed.get(file)
        if mine is None or other is None:
            found.append(
                Difference(file, "", NO_FILE if mine is None else "a file", NO_FILE if other is None else "a file")
            )
        elif mine.kind == other.kind == "values":
            found.extend(
                Difference(file, path, mine.values.get(path, "nothing"), other.values.get(path, "nothing"))
                for path in [*other.values, *(path for path in mine.values if path not in other.values)]
                if mine.values.get(path) != other.values.get(path)
            )
        elif mine.kind == other.kind == "text":
            if not _has_all_lines(mine.lines, other.lines):
                found.extend(_different_lines(file, mine.lines, other.lines))
        elif (mine.digest, mine.num_bytes) != (other.digest, other.num_bytes):
            found.append(Difference(file, "", _bytes_text(mine), _bytes_text(other)))
    return found


def _bytes_text(contents: Contents) -> str:
    return contents.digest[:16] or f"{contents.num_bytes} bytes"


def _has_all_lines(mine: Sequence[str], other: Sequence[str]) -> bool:
    """Tell whether a log has all lines of the other in their order; more lines, such as `resumed at step 10`, do no harm."""
    rest = iter(mine)
    return all(line in rest for line in other)


def _different_lines(file: str, mine: Sequence[str], other: Sequence[str]) -> list[Difference]:
    longest = max(len(mine), len(other))
    pairs = [
        (number, mine[number] if number < len(mine) else "nothing", other[number] if number < len(other) else "nothing")
        for number in range(longest)
    ]
    return [Difference(file, f"line {number + 1}", one, two) for number, one, two in pairs if one != two]


def doubled_files(here: Mapping[str, Contents], undisturbed: Mapping[str, Contents]) -> list[str]:
    """Return text files in which lines stand more often than in the undisturbed run's, by what they say of the position."""
    found = []
    for file, mine in here.items():
        other = undisturbed.get(file)
        if other is None or mine.kind != "text" or other.kind != "text" or len(mine.lines) <= len(other.lines):
            continue
        often, once = Counter(map(_key, mine.lines)), Counter(map(_key, other.lines))
        if _is_for_readers(file, mine.lines):
            continue
        if any(key and often[key] > once[key] for key in once):
            found.append(file)
    return found


def _is_for_readers(file: str, lines: Sequence[str]) -> bool:
    """Tell whether a text is a log, which may say twice what was done twice, and no table of measurements."""
    num_timed = sum(_TIME_OF_DAY.search(line) is not None for line in lines)
    return PurePosixPath(file).suffix in _LOGS or 2 * num_timed > len(lines)


def is_of_log(difference: Difference) -> bool:
    """Tell whether two lines measure the same step, and only their numbers differ."""
    key = _key(difference.undisturbed)
    return difference.path.startswith("line ") and bool(key) and _key(difference.here) == key


def _key(line: str) -> str:
    """Return what a line of a log measures: its step and epoch, or the first field of a table; empty for any other line."""
    parsed = parse(line)
    if parsed.loss is not None and (parsed.step is not None or parsed.epoch is not None):
        return f"{parsed.epoch}/{parsed.step}/{parsed.is_evaluation}"
    match = _FIRST_FIELD.match(line)
    return match[1] if match else ""
