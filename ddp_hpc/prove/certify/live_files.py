"""What a run does to the files of its copy, and what one of its ranks prints, as it happens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.prove.certify.file_events import Kind
from ddp_hpc.prove.certify.output_lines import PrintedLine, parse, scale_from_lines
from ddp_hpc.prove.certify.sandbox import file_stats
from ddp_hpc.prove.certify.saved_files import SAVED_SUFFIXES, is_committed, is_half_written, is_saved_state, masked


@dataclass
class LiveFiles:
    """The files of one attempt."""

    root: Path
    """The copy of the user's working directory."""
    save_names: AbstractSet[str] = frozenset()
    """Names of files that belong to a save, `masked`, as the undisturbed run showed."""
    pattern: str | None = None
    """The user's own pattern of saved files."""
    begun_names: set[str] = field(default_factory=set)
    """Of all files that were begun, `masked`, in this attempt and earlier ones."""
    num_begun: int = 0
    """How many files of saves were begun; one that is moved here from elsewhere (Lightning's, from `/tmp`) begins with its end."""
    _num_done: int = 0
    reads: list[str] = field(default_factory=list)
    """Saved states that were read before this attempt wrote them, and before the first position was printed."""
    written: set[Path] = field(default_factory=set)
    """All files that were begun, or got their names by a renaming."""
    being_written: set[Path] = field(default_factory=set)

    def note(self, kind: Kind, path: Path, has_position: Callable[[], bool]) -> bool:
        """Note what has happened to a file; return whether a saved state was written to its end.

        `has_position` tells whether the script has said where the training is: what it reads later, it does not resume from.
        """
        is_save = self.is_of_save(path)
        if kind == "read" and is_save and path not in self.written and not has_position():
            self.reads.extend(map(self.relative, self._names_of(path)))
        if kind not in {"read", "gone"}:
            self.written.add(path)
        if kind == "begun":
            self.begun_names.add(masked(path.name))
            if is_save and path not in self.being_written:
                self.being_written.add(path)
                self.num_begun += 1
        elif kind in {"done", "named"}:
            self.being_written.discard(path)
            self._num_done += self.is_state(path)
            self.num_begun = max(self.num_begun, self._num_done)
            return self.is_state(path)
        return False

    def is_state(self, path: Path) -> bool:
        """Tell by its name whether a file is a saved state."""
        return is_saved_state(Path(self.relative(path)), self.pattern)

    def is_of_save(self, path: Path) -> bool:
        """Tell by its name whether a file is a saved state, or one that is renamed to it when it is whole."""
        has_suffix = not SAVED_SUFFIXES.isdisjoint(path.suffixes)
        return self.is_state(path) or has_suffix or masked(path.name) in self.save_names

    def relative(self, path: Path) -> str:
        """Return a file's path below the copy."""
        return path.relative_to(self.root).as_posix()

    def _names_of(self, path: Path) -> list[Path]:
        """Return a file's names, this one first: `last.pt` may be a hard link to the newest `epoch_3.pt`."""
        with suppress(OSError):
            if path.stat().st_nlink > 1:
                others = {*self.written, *path.parent.iterdir()} - {path}
                return [path, *(one for one in others if one.exists() and one.samefile(path))]
        return [path]

    def states_now(self) -> tuple[tuple[str, ...], list[str]]:
        """Return the files of saves that end before their end, and the saved states that are whole, the oldest first."""
        found = sorted(file_stats(self.root).items(), key=lambda item: item[1][1])
        paths = [path for path, _ in found if self.is_of_save(self.root / path)]
        half = tuple(path for path in paths if is_half_written(self.root / path))
        whole = (path for path in paths if path not in half and self.is_state(self.root / path))
        return half, [path for path in whole if is_committed(self.root / path)]

    def empty_files(self) -> Iterator[str]:
        """Yield the other files that were begun and hold nothing, such as the one that names the newest state."""
        for path in sorted(self.written):
            with suppress(OSError):
                if not self.is_of_save(path) and path.stat().st_size == 0:
                    yield self.relative(path)


@dataclass
class LiveOutput:
    """The lines of one attempt, of rank zero or of the one that says where the training is."""

    log: Path
    began: float
    """When the run began, by the monotonic clock."""
    lines: list[PrintedLine] = field(default_factory=list)
    _num_bytes: int = 0
    _unfinished: str = ""
    """The part of a line that stands at the end of the log."""
    _last_epoch: float | None = None

    def read(self) -> bool:
        """Read what is new; return whether there was anything."""
        with suppress(OSError):
            if self.log.stat().st_size == self._num_bytes:
                return False
            with self.log.open("rb") as file:
                file.seek(self._num_bytes)
                data = file.read()
            self._num_bytes += len(data)
            text = self._unfinished + data.decode("utf-8", errors="replace")
            *whole, self._unfinished = text.replace("\r", "\n").split("\n")  # progress bars write over their line
            at = time.monotonic() - self.began
            for line in filter(str.strip, whole):
                self.lines.append(parse(line, at, self._last_epoch))
                self._last_epoch = self._last_epoch if self.lines[-1].epoch is None else self.lines[-1].epoch
            return True
        return False

    def has_position(self) -> bool:
        """Tell whether a line has said where the training is: the script has resumed by then."""
        return bool(scale_from_lines(line for line in self.lines if not line.is_mention).unit)

    def step_s(self) -> float:
        """Return how long a step takes, and half a step more, as the newest lines show."""
        newest = self.lines[-5:]
        if len(newest) < 2:
            return 0.05
        return min(0.5, max(0.02, 1.5 * (newest[-1].at - newest[0].at) / (len(newest) - 1)))
