"""What the undisturbed runs have shown, and what is the same in each of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import PurePosixPath

from ddp_hpc.prove.certify.file_differences import differences
from ddp_hpc.prove.certify.output_lines import Scale, losses, positions, scale_of, with_epochs
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord
from ddp_hpc.prove.certify.saved_files import Contents
from ddp_hpc.prove.certify.source_reading import SourceFacts


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the undisturbed runs have shown."""

    record: RunRecord
    source: SourceFacts
    second: RunRecord | None = None
    """A second undisturbed run, where one was needed."""

    @cached_property
    def attempt(self) -> AttemptRecord:
        """The only one."""
        return attempt_with_epochs(self.record.attempts[-1])

    @cached_property
    def scale(self) -> Scale:
        """How its lines say where the training is."""
        return scale_of(self.attempt.lines)

    @property
    def volatile(self) -> frozenset[tuple[str, str]]:
        """Values that differ between two undisturbed runs: times of day, for instance."""
        if self.second is None:
            return frozenset()
        here, other = self.lasting_names(self.second.final), self.lasting_names(self.record.final)
        return frozenset((one.file, one.path) for one in differences(here, other))

    @cached_property
    def _stamps(self) -> frozenset[tuple[int, str]]:
        """Parts of paths, with their depth, that two undisturbed runs name otherwise: by the time of day, or by an id."""
        if self.second is None:
            return frozenset()
        one, other = ({each for path in run.final for each in _parts(path)} for run in (self.record, self.second))
        changed = [
            {(depth, mask) for depth, part in parts if "#" in (mask := masked(part))}
            for parts in (one - other, other - one)
        ]
        return frozenset(changed[0] & changed[1])

    def lasting_name(self, path: str) -> str:
        """Return a file's path with `#` for a time of day or an id in it."""
        parts = [masked(part) if (depth, masked(part)) in self._stamps else part for depth, part in _parts(path)]
        return "/".join(parts)

    def lasting_names(self, files: Mapping[str, Contents], newest: frozenset[str] = frozenset()) -> dict[str, Contents]:
        """Return the files by these names; where several have the same one, that of the newest, or else the last."""
        return {self.lasting_name(path): files[path] for path in sorted(files, key=lambda path: (path in newest, path))}

    @property
    def is_deterministic(self) -> bool | None:
        """Whether two undisturbed runs print the same losses and save the same tensors; None if there was only one run."""
        if self.second is None:
            return None
        second = with_epochs(self.second.attempts[-1].lines)
        same_losses = losses(second, self.scale) == losses(self.attempt.lines, self.scale)
        here, other = self.lasting_names(self.second.final), self.lasting_names(self.record.final)
        tensors = [one for one in differences(here, other) if one.here.startswith("tensor")]
        return same_losses and not tensors

    @property
    def checkpoint(self) -> Contents | None:
        """The values of the newest saved state that has the most to say: one with an optimizer, if any has one."""
        saved = [one.contents for one in self.attempt.saves if one.contents is not None and one.contents.values]
        return next((one for one in reversed(saved) if one.has_optimizer), saved[-1] if saved else None)

    @property
    def steps_between_saves(self) -> int | None:
        """The most positions that lie between two saves."""
        if not self.attempt.saves or not self.scale.unit:
            return None
        counts = [0, *(self._num_positions(one.num_lines) for one in self.attempt.saves)]
        gaps = [later - earlier for earlier, later in pairwise(counts)]
        return max(gaps) * self.scale.stride

    def _num_positions(self, num_lines: int) -> int:
        return len(positions(self.attempt.lines[:num_lines], self.scale))


def _parts(path: str) -> list[tuple[int, str]]:
    return list(enumerate(PurePosixPath(path).parts))


def masked(part: str) -> str:
    """Return a part of a path with `#` for each number and each id in it."""
    return re.sub(r"[^\W_]*\d[^\W_]*|(?<![^\W_])[0-9a-f]{4,}(?![^\W_])", "#", part)


def attempt_with_epochs(attempt: AttemptRecord) -> AttemptRecord:
    """Return the attempt; a step whose line names no epoch gets the one that was printed last."""
    return replace(attempt, lines=with_epochs(attempt.lines))
