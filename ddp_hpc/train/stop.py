"""Being told to stop, and all ranks agreeing on the step: many doors, one room.

SIGTERM, SIGUSR2 and the run's STOP file all mean: commit a checkpoint and leave. A handler sets a flag and nothing
else. The ranks meet every half second or so and add up their flags, so all of them leave after the same step; between
the meetings it costs one comparison a step. Rank zero also looks whether the run is this attempt's still: one that a
newer attempt has taken over leaves at once, and commits nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from ddp_hpc.errors import FencedError
from ddp_hpc.patience import known
from ddp_hpc.processes import STOP_SIGNALS, unblock_signals
from ddp_hpc.train.process_group import Group

MEETING_INTERVAL_S = 0.5
_FENCED_VOTE = 1 << 32
"""More than all ranks' other votes together."""


class StopFlag:
    """Whether this process has been told to stop."""

    def __init__(self, stop_file: Path) -> None:
        self._stop_file = stop_file
        self._pid = os.getpid()
        self._signalled = False

    def listen(self) -> None:
        """Have the stop signals set the flag; loader processes inherit the handler and it ignores them."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        unblock_signals()

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._signalled = True

    def is_set(self, *, look_at_file: bool) -> bool:
        if self._signalled or not look_at_file:
            return self._signalled
        return known(self._stop_file, self._stop_file.exists, unknown=False)


class Meetings:
    """When the ranks meet, and whether they have agreed to stop.

    Rank zero measures how long steps take and says after how many the next meeting is, so all ranks meet after the
    same step without talking in between.
    """

    def __init__(self, group: Group, flag: StopFlag, *, is_ousted: Callable[[], bool]) -> None:
        self._group = group
        self._flag = flag
        self._is_ousted = is_ousted
        self._next_step = 0
        self._met_at: tuple[int, float] | None = None

    def is_due(self, step: int) -> bool:
        return step >= self._next_step

    def agree_to_stop(self, step: int) -> bool:
        """Meet after `step`; return, the same on all ranks, whether any has been told to stop.

        Raises:
            FencedError: on all ranks, where another attempt has taken the run over.
        """
        is_rank_zero = self._group.place.is_rank_zero
        vote = int(self._flag.is_set(look_at_file=is_rank_zero))
        pause = 0
        if is_rank_zero:
            vote += _FENCED_VOTE if self._is_ousted() else 0
            pause = self._steps_until_next(step)
        votes = self._group.sum(torch.tensor([vote, pause], dtype=torch.int64))
        told_sum, pause_sum = votes.tolist()
        if told_sum >= _FENCED_VOTE:
            raise FencedError(f"Another attempt has taken the run over; this one leaves at step {step}.")
        self._next_step = step + pause_sum
        return bool(told_sum > 0)

    def _steps_until_next(self, step: int) -> int:
        now = time.monotonic()
        before, self._met_at = self._met_at, (step, now)
        if before is None or step == before[0]:
            return 1
        seconds_a_step = (now - before[1]) / (step - before[0])
        return max(1, min(int(MEETING_INTERVAL_S / max(seconds_a_step, 1e-9)), 2 * (step - before[0])))
