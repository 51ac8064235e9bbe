"""What the undisturbed runs have shown, and what is the same in each of them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ddp_hpc.prove.certify.file_differences import FileDifference, aligned, differences
from ddp_hpc.prove.certify.output_lines import Scale, losses, positions, scale_of
from ddp_hpc.prove.certify.records import AttemptRecord, RunRecord
from ddp_hpc.prove.certify.saved_files import Contents, kind_of


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the undisturbed runs have shown."""

    record: RunRecord
    second: RunRecord | None = None
    """A second undisturbed run, where one was needed."""

    @property
    def attempt(self) -> AttemptRecord:
        """The only one."""
        return self.record.attempts[-1]

    @cached_property
    def scale(self) -> Scale:
        """How its lines say where the training is."""
        return scale_of(self.attempt.lines)

    @cached_property
    def _own_differences(self) -> list[FileDifference]:
        """By what the files of two undisturbed runs differ."""
        if self.second is None:
            return []
        return differences(aligned(self.second.final, self.record.final), self.record.final)

    @property
    def volatile(self) -> frozenset[tuple[str, str]]:
        """Values that differ between two undisturbed runs: times of day, for instance."""
        return frozenset((one.file, one.path) for one in self._own_differences)

    @property
    def is_deterministic(self) -> bool | None:
        """Whether two undisturbed runs print the same losses and save the same tensors; None if there was only one run."""
        if self.second is None:
            return None
        same_losses = losses(self.second.attempts[-1].lines, self.scale) == losses(self.attempt.lines, self.scale)
        return same_losses and not any(one.here.startswith("tensor") for one in self._own_differences)

    @cached_property
    def checkpoint(self) -> Contents | None:
        """The values of all its saved states, as one state may lie in several files; None where none could be read."""
        saved = [one.contents.values for one in self.attempt.saves if one.contents is not None]
        values = {path: text for each in saved for path, text in each.items()}
        return Contents(kind="values", values=values) if values else None

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of files that it saves; only those with an optimizer, if any has one, as the others are exports."""
        saves = self.attempt.saves
        whole = [one for one in saves if one.contents is not None and one.contents.has_optimizer]
        return frozenset(kind_of(one.path) for one in whole or saves)

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
