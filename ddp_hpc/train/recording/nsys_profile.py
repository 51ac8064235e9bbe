"""Has Nsight Systems record some steps of a rank that runs under it, with a range for each step and phase."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ddp_hpc.nsys import Capture
from ddp_hpc.train.recording.phase_times import BEGIN_STEPS, PhaseTimes

log = logging.getLogger(__name__)


RESUMED_BEHIND = "the attempt began behind these steps; set `profile.steps` to later ones"
"""Why an attempt records nothing."""


def ends_before(step: int) -> str:
    """Return why an attempt records nothing whose training ends before the first step that is to be recorded."""
    return f"the attempt ended before step {step}; set `profile.steps` to steps that the run takes"


class Ranges(Protocol):
    """What opens and closes nested ranges, as `torch.cuda.nvtx` does."""

    def range_push(self, msg: str) -> object:
        """Open a range."""

    def range_pop(self) -> object:
        """Close the range that was opened last."""


class NsysProfile(PhaseTimes):
    """Times the phases, and has the chosen steps recorded. Where that fails, the training goes on without."""

    def __init__(  # noqa: PLR0913  as `StepProfile`
        self,
        steps: tuple[int, int],
        capture: Capture | str,
        report: Path,
        device: torch.device,
        next_step: Callable[[], int],
        *,
        ranges: Ranges | None = None,
        note: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`note` is called with the reason where nothing is recorded."""
        super().__init__()
        self._first, self._last = steps
        self._capture = capture
        self._report = report
        self._device = device
        self._next_step = next_step
        self._note = note
        # PyTorch has NVTX where it is built with CUDA.
        self._ranges = ranges or (torch.cuda.nvtx if device.type == "cuda" else None)
        self._num_open = 0
        self._is_recording = False
        self._step = self._began_at = 0
        """The newest step that is recorded, and the first one: a run may resume among the chosen steps."""
        self._is_over = isinstance(capture, str)
        if isinstance(capture, str):
            self._warn(capture)

    def enter(self, phase: str) -> None:
        """End the phase before, and begin this one, and whatever begins or ends with it."""
        super().enter(phase)
        if self._is_over:
            return
        step = self._next_step()
        if step > self._last:
            self._end(RESUMED_BEHIND)
        elif step >= self._first:
            self._guarded(lambda: self._follow(step, phase))

    def close(self) -> None:
        """End the record; nsys writes its report meanwhile."""
        self._end(ends_before(self._first))

    def _end(self, why_not: str) -> None:
        """End the record, if there is one; else `why_not` is the reason."""
        if not self._is_over:
            self._is_over = True
            if not self._is_recording:
                self._note(why_not)
            self._guarded(self._finish)
        if isinstance(self._capture, Capture):
            self._capture.close()

    def _follow(self, step: int, phase: str) -> None:
        assert isinstance(self._capture, Capture)  # noqa: S101  else it is over
        if not self._is_recording:
            if phase not in BEGIN_STEPS:  # after a step that is not to be recorded
                return
            if why_not := self._capture.begin():
                self._is_over = True
                self._warn(why_not)
                return
            self._is_recording = True
        # An evaluation and a save come after their step, and belong to it, though the next one is counted already.
        if step != self._step and phase in BEGIN_STEPS:
            self._leave(0)
            self._began_at = self._began_at or step
            self._step = step
            self._begin(f"step {step}")
        self._leave(1)
        self._begin(phase)

    def _finish(self) -> None:
        assert isinstance(self._capture, Capture)  # noqa: S101  else it is over
        if not self._is_recording:
            return
        self._leave(0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else kernels that still run would be missing
        self._capture.end()
        log.info("nsys has recorded steps %d to %d, and writes %s", self._began_at, self._step, self._report)

    def _begin(self, name: str) -> None:
        if self._ranges:
            self._ranges.range_push(name)
            self._num_open += 1

    def _leave(self, num_kept: int) -> None:
        while self._num_open > num_kept and self._ranges:
            self._ranges.range_pop()
            self._num_open -= 1

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  the training matters more
            self._is_over = True
            self._warn(f"{type(error).__name__}: {error}")

    def _warn(self, why_not: str) -> None:
        self._note(why_not)
        log.warning(
            "the profile of steps %d to %d cannot be recorded: %s. The training goes on without it.",
            self._first,
            self._last,
            why_not,
        )
