"""How often the files that a script saves its state to have changed: its progress, without a line of code in it.

A file counts that was not in the last record, or whose size or modification time differs from it. So a save is seen
whatever the clocks of nodes and file servers say, and where a script keeps its newest files only: a deletion changes nothing.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.base.patience import is_final_error
from ddp_hpc.base.record import read_record
from ddp_hpc.run.run_dir.paths import RunDir

MOST_FILES = 20_000
"""The most files of a pattern that are recorded: one with more names something else than saved states."""
_STARS_IN_A_NAME = re.compile(r"(?<=[^/])\*{2,}|\*{2,}(?=[^/])")
FileStates = Mapping[str, tuple[int, int]]
"""Path -> size and modification time in ns."""


@dataclass(frozen=True, kw_only=True)
class SeenFiles:
    """The last record of the files."""

    num_changes: int = 0
    files: FileStates = field(default_factory=dict)
    pattern: str = ""
    """Of these files, absolute: a command may be called in another directory."""

    @property
    def newest_at(self) -> float | None:
        """When the newest of them was written, in seconds since the epoch; None without one."""
        return max((at_ns / 1e9 for _, at_ns in self.files.values()), default=None)


def find_saved_files(pattern: str, work_dir: Path) -> FileStates:
    """Return the files that a pattern matches now, and those in directories that it matches; not those of writers (`*.tmp`)."""
    found: dict[str, tuple[int, int]] = {}
    root = pattern_root(pattern, work_dir)
    below = absolute_glob(pattern, work_dir)[len(str(root)) :].lstrip("/")
    has_hidden = re.search(r"(^|/)\.", below) is not None  # `*` matches no `.last.pt`, as in a shell
    # Not by `glob.glob`, whose `**` follows links, of which two that lead back never end.
    for match in root.glob(_STARS_IN_A_NAME.sub("*", below)):
        if not has_hidden and any(part.startswith(".") for part in match.relative_to(root).parts):
            continue
        for path in itertools.chain([match], match.rglob("*")):
            try:
                status = path.stat()
            except OSError as error:
                # A writer has renamed it, or its link leads nowhere.
                if is_final_error(error) or error.errno == errno.ELOOP:
                    continue
                raise
            if stat.S_ISREG(status.st_mode) and path.suffix != ".tmp":
                found[os.fsencode(path).decode(errors="backslashreplace")] = (status.st_size, status.st_mtime_ns)
            if len(found) >= MOST_FILES:
                return found
    return found


def pattern_root(pattern: str, work_dir: Path) -> Path:
    """Return the directory that a pattern names before its first wildcard."""
    return Path(os.path.dirname(re.split(r"[*?\[]", absolute_glob(pattern, work_dir), maxsplit=1)[0]))  # noqa: PTH120  text


def absolute_glob(pattern: str, work_dir: Path) -> str:
    """Return a pattern as one that means the same in any directory."""
    return str(work_dir / os.path.expanduser(pattern))  # noqa: PTH111  text, with `~`


def read_seen_files(run: RunDir) -> SeenFiles:
    """Return what was recorded; nothing before the first record."""
    return read_record(run.script_progress, SeenFiles) or SeenFiles()


def look(seen: SeenFiles, pattern: str, work_dir: Path) -> SeenFiles:
    """Return the record with the files as they are now; the same where none has changed.

    At the first look, and after the pattern has changed, none counts as changed: what is there already, this run has not saved.
    """
    files, pattern = find_saved_files(pattern, work_dir), absolute_glob(pattern, work_dir)
    if pattern != seen.pattern:
        return SeenFiles(num_changes=seen.num_changes, files=files, pattern=pattern)
    if all(seen.files.get(path) == state for path, state in files.items()):
        return seen
    return SeenFiles(num_changes=seen.num_changes + 1, files=files, pattern=pattern)
