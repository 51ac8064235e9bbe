"""How long the loop spends in each phase of its steps: two reads of a clock and one addition for each."""

from __future__ import annotations

import time
from collections.abc import Callable

from ddp_hpc.cluster.slow_ranks.summary import Phases

PHASES = ("data", "host to device", "forward", "backward", "optimizer", "checkpoint", "evaluation", "other")
"""The phases; the wait for other ranks is part of `backward`. On a GPU these are the times of the host, which runs ahead."""

STEP_BEGIN_PHASES = frozenset({"data", "host to device", "forward"})
"""The phases with which a step begins. An evaluation and a save come after a step."""


class PhaseTimes:
    """The time spent in each phase since the beginning."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._clock = clock
        self._phase = "other"
        self._at = clock()
        self.num_steps = 0

    def enter(self, phase: str) -> None:
        """End the phase before, and begin this one."""
        now = self._clock()
        self._seconds[self._phase] += now - self._at
        self._phase, self._at = phase, now

    def close(self) -> None:
        """End what was begun beside the timer; the timer itself needs no end."""

    def times_so_far(self) -> Phases:
        """Return the times so far; another thread may call it."""
        return Phases(num_steps=self.num_steps, seconds=dict(self._seconds))
