"""By which values, lines and files two runs differ. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import PurePosixPath

from ddp_hpc.prove.certify.saved_files import Contents

NO_FILE, _NOTHING = "no such file", "nothing"
_TABLE_SUFFIXES = frozenset({".csv", ".tsv", ".jsonl"})
_MESSAGE_SUFFIXES = frozenset({".log", ".out", ".err"})

_RESUME = r"(?:resume(?:_from\w*|_path|_checkpoint)?|auto_resume|start_epoch|start_iter|init_from)"
_RESUME_ARGUMENT = re.compile(rf"(?:^|\.)(?:args|opts?|cfg|config|hparams|hyper_parameters)\.(?:\w+\.)*{_RESUME}$")
_RESUME_LINE = re.compile(rf"\W*{_RESUME}\W*[:=]")


@dataclass(frozen=True)
class FileDifference:
    """A value that differs from the undisturbed run's."""

    file: str
    path: str
    """Of the value in the file; a line's number in a text; empty for a whole file."""
    here: str
    undisturbed: str
    is_of_records: bool = False
    """Whether it is a table of JSON objects, of which the resumed run has a part (MMEngine's `scalars.json` begins anew in each attempt)."""

    @property
    def is_of_log(self) -> bool:
        """Whether it is a line of a log or a table."""
        is_of_table = self.is_of_records or PurePosixPath(self.file).suffix in _TABLE_SUFFIXES
        return self.is_of_messages or (self.path.startswith("line ") and is_of_table)

    @property
    def is_of_messages(self) -> bool:
        """Whether it is a line of a log, which tells times, and of a resume."""
        return self.path.startswith("line ") and PurePosixPath(self.file).suffix in _MESSAGE_SUFFIXES

    @property
    def is_of_resume(self) -> bool:
        """Whether it is an argument that names what to resume from or where: `args.resume` in a state, `resume:` in a text."""
        if self.path.startswith("line "):
            return all(map(_RESUME_LINE.match, (self.here, self.undisturbed)))
        return _RESUME_ARGUMENT.search(self.path) is not None


def differences(here: Mapping[str, Contents], undisturbed: Mapping[str, Contents]) -> list[FileDifference]:
    """Return the values by which the files of two runs differ."""
    found: list[FileDifference] = []
    for file in sorted({*here, *undisturbed}):
        mine, other = here.get(file), undisturbed.get(file)
        if mine is None or other is None:
            here_text, there_text = (NO_FILE if one is None else "a file" for one in (mine, other))
            found.append(FileDifference(file, "", here_text, there_text))
        elif mine.kind == other.kind and mine.kind != "bytes":
            paths = dict.fromkeys([*other.values, *mine.values])
            pairs = {path: (mine.values.get(path, _NOTHING), other.values.get(path, _NOTHING)) for path in paths}
            rest = iter(mine.lines)  # a log may have more lines than the other, such as `resumed at step 10`
            if not all(line in rest for line in other.lines):
                lines = enumerate(zip_longest(mine.lines, other.lines, fillvalue=_NOTHING), 1)
                pairs |= {f"line {number}": pair for number, pair in lines}
            texts = [line.strip() for line in other.lines if line.strip()]
            are_records = len(texts) > 1 and all(text.startswith("{") and text.endswith("}") for text in texts)
            is_of_records = are_records and {*mine.lines} <= {*other.lines}
            both = ((path, pair) for path, pair in pairs.items() if pair[0] != pair[1])
            found += [FileDifference(file, path, *pair, is_of_records) for path, pair in both]
        elif (mine.digest, mine.num_bytes) != (other.digest, other.num_bytes):
            here_text, there_text = (one.digest[:16] or f"{one.num_bytes} bytes" for one in (mine, other))
            found.append(FileDifference(file, "", here_text, there_text))
    return found


def align_file_names(
    here: Mapping[str, Contents], undisturbed: Mapping[str, Contents], newest: Collection[str] = ()
) -> dict[str, Contents]:
    """Return the files by the undisturbed run's names, where only a number or an id in a directory's name differs: `version_0`.

    Loggers make such a directory for each attempt: a log whose first lines stand in the old one goes on in the new one. Of
    several, one of the newest files counts, or else the last.
    """
    found = dict(here)
    extra = {_masked(path): path for path in sorted({*here} - {*undisturbed}, key=lambda path: (path in newest, path))}
    for path, contents in undisturbed.items():
        mine, there = here.get(path), extra.get(_masked(path))
        if there is None or (mine is not None and (contents.kind != "text" or len(mine.lines) >= len(contents.lines))):
            continue
        found[path] = here[there] if mine is None else replace(here[there], lines=(*mine.lines, *here[there].lines))
    return found


def _masked(path: str) -> str:
    """Return a path with `#` for each number and each id in its directories' names."""
    folder, _, name = path.rpartition("/")
    return re.sub(r"[^\W_]*\d[^\W_]*|(?<![^\W_])[0-9a-f]{4,}(?![^\W_])", "#", folder) + f"/{name}"


def doubled_line(here: Mapping[str, Contents], undisturbed: Mapping[str, Contents]) -> tuple[str, str] | None:
    """Return a table, and a line of it that stands there more often than in the undisturbed run's."""
    for file, other in undisturbed.items():
        if file not in here or PurePosixPath(file).suffix not in _TABLE_SUFFIXES:
            continue
        often, once = Counter(here[file].lines), Counter(other.lines)
        line = next((one for one in once if one and often[one] > once[one]), None)
        if line is not None:
            return file, line
    return None
