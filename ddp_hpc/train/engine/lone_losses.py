"""A loss that is not finite on some ranks alone: a wrong bit may have done that, so another attempt computes the step again.

All ranks have the same weights, so when a training diverges, one attempt alone does not show whether a processor or a sample was bad. One
step later, all ranks have weights that are not finite, and their digests are equal. So the attempt ends as one whose ranks differ. If
the next one finds finite losses in that step, the ranks with the others were wrong. If it ends in the same way, the training diverges.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from ddp_hpc.base.errors import RanksDifferError
from ddp_hpc.base.processes import host_name
from ddp_hpc.run.checkpoints import checkpoint_names
from ddp_hpc.run.run_dir.differences import (
    FINITE,
    NOT_FINITE,
    Difference,
    Repetition,
    by_repetition,
    read_differences,
    write_difference,
)
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.comparable import not_comparable, processor_of
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.replicas import message_of

log = logging.getLogger(__name__)


class LoneLosses:
    """In which step the losses begin not to be finite, and on which ranks."""

    def __init__(
        self, run: RunDir, group: Group, *, attempt: int, tries_again: bool, compare: Callable[[], object]
    ) -> None:
        """`compare` compares the ranks' weights. `tries_again`: whether another attempt may follow."""
        self._run = run
        self._group = group
        self._attempt = attempt
        self._compare = compare
        self._is_active = tries_again and group.rank_info.world_size > 1
        self._began: tuple[int, bool] | None = None
        """The first step of the row of bad ones, and whether this rank's loss was bad in it."""
        self._open: list[Difference] | None = None

    def note(self, step: int, *, is_mine: bool, is_finite: bool) -> None:
        """Take note of a step's losses: whether this rank's was not finite, and whether those of all were."""
        if is_finite:
            self._began = None
            self._tell(step)
        elif self._began is None:
            self._began = step, is_mine

    def _tell(self, step: int) -> None:
        """Record, on rank zero, that this attempt has finite losses where those of an earlier one were not."""
        if not (self._is_active and self._group.rank_info.is_rank_zero):
            return
        with suppress(OSError):  # what cannot be read or written now is told by a later attempt, or not at all
            if self._open is None:
                self._open = [one for one in read_differences(self._run) if one.of_loss and one.repeated_in is None]
            for one in [one for one in self._open if one.step == step]:
                self._open.remove(one)
                told = by_repetition(one, self._repetition(one))
                write_difference(self._run, told)
                log.warning("the earlier attempt %d ended because %s; %s", told.attempt, told.what, told.who)

    def _repetition(self, one: Difference) -> Repetition:
        different = not_comparable(
            self._run,
            one,
            attempt=self._attempt,
            world_size=self._group.rank_info.world_size,
            processor=processor_of(self._group.device),
        )
        return Repetition(attempt=self._attempt, digest=FINITE, values={}, not_comparable=different)

    def end(self) -> str:
        """Return on which ranks the losses began not to be finite, as the end of a sentence; empty if on all.

        All ranks call this before a training ends as diverged.
        """
        self._compare()
        if not self._is_active or self._began is None:
            return ""
        step, is_mine = self._began
        own = {"bad": is_mine, "host": host_name(), "processor": processor_of(self._group.device)}
        found = self._group.gathered_by_rank_zero(own)
        answer = ["", ""]
        if found and not all(one["bad"] for one in found):
            now = Difference(
                attempt=self._attempt,
                step=step,
                digests=tuple(NOT_FINITE if one["bad"] else FINITE for one in found),
                hosts=tuple(one["host"] for one in found),
                processors=tuple(one["processor"] for one in found),
                tensors=("the loss",),
                num_tensors=1,
                at=time.time(),
                of_loss=True,
            )
            answer = [f", first {now.where_not_finite}", "" if self._has_come_again() else message_of(self._run, now)]
            if answer[1]:
                with suppress(OSError):  # then no later attempt can tell who was wrong
                    write_difference(self._run, now)
        first, message = self._group.broadcast_through_store("lone-losses", answer)
        if message:
            raise RanksDifferError(self._group.last_word("lone-losses/end", message))
        return str(first)

    def _has_come_again(self) -> bool:
        """Tell whether an earlier attempt has ended so since the newest checkpoint, and no rank was proved wrong."""
        newest = max(checkpoint_names.committed_steps(self._run), default=0)
        return any(one.of_loss and one.step > newest and not one.odd_ranks for one in read_differences(self._run))
