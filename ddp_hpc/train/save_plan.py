"""After which steps the ranks save: at multiples of a number, or as often as rank zero announces (`checkpoint.every_steps=auto`).

Rank zero measures, chooses a number of steps, and announces it where the ranks exchange their stop flags anyway (`stop`). All
ranks count from the same save, so all save after the same step, whatever their clocks say. Where saves fail for too long, it announces
a last one (`checkpoint.max_failing_s`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from ddp_hpc.train.auto_interval import AutoInterval

NO_STEP = 2**62
"""The number of a step that no training reaches."""


@dataclass
class SavePlan:
    """When the next periodic checkpoint is due, the same on all ranks."""

    every: int | Literal["auto"] | None
    make_auto: Callable[[], AutoInterval] | None = None
    """Makes what measures and chooses; only rank zero of a training with `every="auto"` has it."""
    _: KW_ONLY
    max_failing_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    is_last_try: bool = False
    """Whether to save now, and to end the run if that fails."""
    _auto: AutoInterval | None = None
    _failing_since: float | None = None
    """On rank zero, when the first failed save since the newest checkpoint ended."""
    _announced: int = NO_STEP
    _saved_step: int = 0

    def begin(self, step: int) -> None:
        """Begin to count after `step`, from which the training resumes."""
        self._saved_step = step
        self._auto = self.make_auto and self.make_auto()

    def is_due(self, step: int) -> bool:
        return self.next_step(step - 1) == step

    def next_step(self, step: int) -> int:
        """Return the first step after `step` that is due, as far as is known."""
        if self.is_last_try:
            return step + 1
        if self.every == "auto":
            return max(step + 1, self._saved_step + self._announced)
        return NO_STEP if self.every is None else (step // self.every + 1) * self.every

    @contextmanager
    def count_from_save(self, step: int) -> Iterator[None]:
        """Count from this save, and measure how long training waits for it; the next one is due once rank zero has announced that.

        What it announced before may have been for this save only, such as an early one after a failure.
        """
        self._saved_step = step
        self._announced = NO_STEP
        with nullcontext() if self._auto is None else self._auto.measure_stall(step):
            yield
        self.is_last_try = False

    def next_announcement(self, step: int) -> tuple[int, bool]:
        """Return what rank zero announces after `step`: how many steps lie between two saves, and whether a last try is due now."""
        since, most_s = self._failing_since, self.max_failing_s
        is_last_try = since is not None and most_s is not None and self.clock() - since >= most_s
        every = 0 if self._auto is None or is_last_try else self._auto.choose(step)
        return every or NO_STEP, is_last_try

    def take_announced(self, every: int, is_last_try: int) -> None:
        """Take over what rank zero has announced."""
        self._announced, self.is_last_try = every, bool(is_last_try)

    def note_written(self, seconds: float | None) -> None:
        """Take note that a save was committed in so many seconds, or has failed (None); the writer's thread calls this."""
        self._failing_since = None if seconds is not None else self._failing_since or self.clock()
        if self._auto is not None:
            self._auto.note_written(seconds)
