"""Tells Nsight Systems which steps of a rank to record, with a range for each step and phase."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress

import torch

from ddp_hpc.base.processes import host_name
from ddp_hpc.train.recording.phase_times import BEGIN_STEPS, PhaseTimes

log = logging.getLogger(__name__)

RESUMED_BEHIND = "the attempt began behind these steps; set `profile.steps` to later ones"
"""Why an attempt records nothing."""


def ends_before(step: int) -> str:
    """Return why an attempt records nothing whose training ends before the first step that is to be recorded."""
    return f"the attempt ended before step {step}; set `profile.steps` to steps that the run takes"


def why_not_by_nsys(device: torch.device) -> str:
    """Return why nsys records nothing of this rank, or an empty text."""
    if shutil.which("nsys") is None:
        return (
            f"`profile.kind` is 'nsys', but there is no program 'nsys' on the PATH of {host_name()}. Have the job load it "
            "(`slurm.modules`), or set PATH by `env.PATH`"
        )
    return (
        ""
        if device.type == "cuda"
        else "nsys records from cudaProfilerStart on, which takes a GPU; use `profile.kind=torch`"
    )


class NsysProfile(PhaseTimes):
    """Times the phases, and has the chosen steps recorded (`under_nsys.profile_argv`)."""

    def __init__(
        self,
        steps: tuple[int, int],
        device: torch.device,
        next_step: Callable[[], int],
        *,
        note: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`note` is called with the reason where nothing is recorded."""
        super().__init__()
        self._first, self._last = steps
        self._device = device
        self._next_step = next_step
        self._note = note
        self._num_open = 0
        """Ranges that are open: of the step, and of the phase in it."""
        self._step = self._began_at = 0
        """The newest step that is recorded, and the first one: a run may resume among the chosen steps."""
        self._is_over = False
        if why_not := why_not_by_nsys(device):
            self._is_over = True
            note(why_not)
            log.warning("steps %d to %d are not recorded: %s. The training goes on without it.", *steps, why_not)

    def enter(self, phase: str) -> None:
        """End the phase before, and begin this one, and whatever begins or ends with it."""
        super().enter(phase)
        if self._is_over:
            return
        step = self._next_step()
        if step > self._last:
            self._end(RESUMED_BEHIND)
        elif step >= self._first:
            self._follow(step, phase)

    def close(self) -> None:
        """End the record; nsys writes its report meanwhile."""
        self._end(ends_before(self._first))

    def _follow(self, step: int, phase: str) -> None:
        # An evaluation and a save come after their step, and belong to it, though the next one is counted already.
        if step != self._step and phase in BEGIN_STEPS:
            if not self._began_at:
                torch.cuda.profiler.start()
                self._began_at = step
            self._leave(0)
            self._step = step
            self._open(f"step {step}")
        if self._began_at:
            self._leave(1)
            self._open(phase)

    def _end(self, why_not: str) -> None:
        """End the record, if there is one; else `why_not` is the reason."""
        if self._is_over:
            return
        self._is_over = True
        if not self._began_at:
            self._note(why_not)
            return
        self._leave(0)
        with suppress(RuntimeError):  # a failure of CUDA has ended the training
            torch.cuda.synchronize(self._device)  # else kernels that still run would be missing
            torch.cuda.profiler.stop()
        log.info("nsys has recorded steps %d to %d", self._began_at, self._step)

    def _open(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)
        self._num_open += 1

    def _leave(self, num_kept: int) -> None:
        while self._num_open > num_kept:
            torch.cuda.nvtx.range_pop()
            self._num_open -= 1
