"""Chooses how many steps lie between two checkpoints, on rank zero, from what it measures (`checkpoint.every_steps=auto`)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from statistics import median

from ddp_hpc.cluster.slow_ranks.summary import Phases
from ddp_hpc.run.checkpoints.past_saves import PastSaves
from ddp_hpc.run.checkpoints.save_interval import (
    ASSUMED_STALL_S,
    SaveCosts,
    SaveInterval,
    between_failures_s,
    choose_interval,
    is_worth_changing,
)
from ddp_hpc.run.spec import CheckpointSpec

log = logging.getLogger(__name__)

_NON_STEP_PHASES = ("checkpoint", "evaluation")
_NUM_NEWEST_SAVES = 5
"""The middle one of so many stalls and writes counts: one slow save changes nothing, three do."""
_NUM_NEWEST_SPEEDS = 64
"""The speed is that of the time between so many exchanges of the ranks: half a minute, or 64 steps where they are long."""

_MIN_MEASURED_S = 1.0
"""Steps that took less together do not show how long one takes."""


@dataclass
class AutoInterval:
    """The interval of one attempt; made when its training begins."""

    keys: CheckpointSpec
    past: PastSaves
    """What earlier attempts say."""
    _: KW_ONLY
    phases: Callable[[], Phases]
    """The times of this process."""
    note: Callable[[int, Mapping[str, float]], None]
    """Records a choice, after a step."""
    wait_for_device: Callable[[], object] = lambda: None
    clock: Callable[[], float] = time.monotonic
    _saved_at: float = 0.0
    _num_saves: int = 0
    _num_written: int = 0
    _speeds: deque[tuple[int, float]] = field(default_factory=partial(deque, maxlen=_NUM_NEWEST_SPEEDS))
    _chosen: SaveInterval | None = None

    def __post_init__(self) -> None:
        self._began_at = self.clock()
        self._stalls = deque(self.past.stalls_s, maxlen=_NUM_NEWEST_SAVES)
        self._writes = deque(self.past.writes_s, maxlen=_NUM_NEWEST_SAVES)

    @contextmanager
    def measure_stall(self, step: int) -> Iterator[None]:
        """Measure how long training waits for the save after `step`."""
        self.wait_for_device()  # what the device still has to compute is no part of the save
        began = self.clock()
        yield
        # The first save makes the buffers, so it counts only until there is another.
        if self._num_saves == 1:
            self._stalls.clear()
        self._num_saves += 1
        self._saved_at = self.clock()
        self._stalls.append(self._saved_at - began)
        if self._chosen is not None and not self._chosen.is_measured:
            self.choose(step)  # the attempt may fail before the next exchange, and the next one needs what was measured

    def note_written(self, seconds: float | None) -> None:
        """Take note that a save was committed, or has failed (None); the checkpoint writer's thread calls this."""
        self._num_written += 1
        if seconds is not None:
            self._writes.append(seconds)

    def choose(self, step: int) -> int:
        """Return after how many steps to save, or 0 as long as the speed is not known.

        Log and record it where it clearly changes, and once when the stall is no longer assumed. Between two changes, the
        number of steps follows only the limits.
        """
        step_s, chosen = self._step_s(), self._chosen
        if step_s is None:
            return 0 if chosen is None else chosen.every_steps
        costs = self._costs()
        is_measured = bool(self._stalls)
        best_s, why = choose_interval(costs, self.keys, is_measured=is_measured)
        every = max(1, round(best_s / step_s))
        if chosen is None or is_worth_changing(chosen.every_steps, every) or is_measured > chosen.is_measured:
            self._chosen = chosen = SaveInterval(
                every_steps=every,
                seconds=every * step_s,
                costs=costs,
                is_measured=is_measured,
                num_failures=self.past.num_failures,
                expected_cost=costs.cost_share(every * step_s),
            )
            self.note(step, chosen.as_numbers())
            log.info("the run saves %s: %s", chosen.interval_text(), chosen.reason_text(why))
        kept_s = chosen.every_steps * step_s
        if why != "written":  # which wins over the limits
            kept_s = min(max(kept_s, self.keys.min_interval_s), self.keys.max_interval_s)
        return max(1, round(kept_s / step_s))

    def _step_s(self) -> float | None:
        """Return how long a step takes, without saves and evaluations; None as long as that is not known.

        The first step is left out: it may compile.
        """
        phases = self.phases()
        if phases.num_steps == 0:
            return None
        trained_s = sum(seconds for name, seconds in phases.seconds.items() if name not in _NON_STEP_PHASES)
        if not self._speeds or phases.num_steps > self._speeds[-1][0]:
            self._speeds.append((phases.num_steps, trained_s))
        (before, then), (now, here) = self._speeds[0], self._speeds[-1]
        return (here - then) / (now - before) if here - then >= _MIN_MEASURED_S else None

    def _costs(self) -> SaveCosts:
        now, past = self.clock(), self.past
        writing_s = now - self._saved_at if self._num_saves > self._num_written else 0.0
        return SaveCosts(
            stall_s=median(self._stalls) if self._stalls else ASSUMED_STALL_S,
            write_s=max(median(self._writes) if self._writes else 0.0, writing_s),
            restart_s=past.restart_s or 0.0,
            between_failures_s=between_failures_s(
                num_failures=past.num_failures, trained_s=past.trained_s + now - self._began_at
            ),
        )
