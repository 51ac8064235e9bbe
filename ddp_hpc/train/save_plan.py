"""After which steps the ranks save: at multiples of a number, or as often as rank zero announces (`checkpoint.every_steps=auto`).

Rank zero measures, chooses a number of steps, and announces it where the ranks exchange their stop flags anyway (`stop`). All
ranks count from the same save, so all save after the same step, whatever their clocks say.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ddp_hpc.train.auto_interval import AutoInterval

_NEVER = 2**62


class SavePlan:
    """When the next periodic checkpoint is due, the same on all ranks."""

    def __init__(self, every: int | Literal["auto"] | None, auto: AutoInterval | None = None) -> None:
        """`auto` measures and chooses; only rank zero of a training with `every="auto"` has it."""
        self._every = every
        self._auto = auto
        self._announced = _NEVER
        self._saved_step = 0

    def begin(self, step: int) -> None:
        """Begin to count after `step`, from which the training resumes."""
        self._saved_step = step
        if self._auto is not None:
            self._auto.begin()

    def is_due(self, step: int) -> bool:
        """Tell whether to save after this step."""
        if self._every == "auto":
            return step - self._saved_step >= self._announced
        return self._every is not None and step % self._every == 0

    def next_step(self, step: int) -> int:
        """Return the first step after `step` that is due, as far as is known."""
        if self._every == "auto":
            return self._saved_step + self._announced
        return _NEVER if self._every is None else (step // self._every + 1) * self._every

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Count from this save, and measure how long training waits for it; the next one is due once rank zero has announced that.

        What it announced before may have been for this save only, such as an early one after a failure.
        """
        self._saved_step = step
        self._announced = _NEVER
        if self._auto is None:
            yield
            return
        with self._auto.saving(step):
            yield

    def to_announce(self, step: int) -> int:
        """Return what rank zero announces after `step`; 0 on the other ranks, and without `auto`."""
        return 0 if self._auto is None else self._auto.choose(step)

    def announced(self, every: int) -> None:
        """Take over what rank zero has announced; 0: nothing yet."""
        self._announced = every or _NEVER

    def written(self, seconds: float | None) -> None:
        """Take note that a save was committed in so many seconds, or has failed (None); the writer's thread calls this."""
        if self._auto is not None:
            self._auto.written(seconds)
