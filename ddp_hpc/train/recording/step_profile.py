"""Has PyTorch's profiler record some steps of a rank, each in a range with its phases.

It stands in the place of the phases' timer, which the loop calls anyway, so a run without a profile pays nothing for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile as AnyProfiler  # noqa: N812  a class
from torch.profiler import ProfilerActivity, profile, record_function

from ddp_hpc.base.durable import make_directories, new_file_mode, replace_text
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec.training import ProfileSpec
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recording.phase_times import STEP_BEGIN_PHASES, PhaseTimes

log = logging.getLogger(__name__)

_MOST_ROWS = 40
"""Rows of the table of operators."""


def phase_timer(
    spec: ProfileSpec, run: RunDir, group: Group, *, attempt: int, next_step: Callable[[], int]
) -> PhaseTimes:
    """Return what times the phases of this rank; `next_step` says which step the loop is at, from 1 on."""
    rank = group.rank_info.rank
    if spec.kind == "off" or rank not in spec.ranks:
        return PhaseTimes()
    trace = run.profile_trace(attempt, rank)
    return StepProfile(spec.steps, trace, run.profile_table(attempt, rank), group.device, next_step)


class StepProfile(PhaseTimes):
    """Times the phases, and has PyTorch's profiler record the chosen steps; one that fails is left alone, and the training goes on."""

    def __init__(
        self, steps: tuple[int, int], trace: Path, table: Path, device: torch.device, next_step: Callable[[], int]
    ) -> None:
        super().__init__()
        self._first, self._last = steps
        self._trace, self._table = trace, table
        self._device = device
        self._next_step = next_step
        self._why_not = f"the attempt ended before step {self._first}; set `profile.steps` to steps that the run takes"
        self._is_over = False
        self._step = self._began_at = 0
        """The newest step that is recorded, and the first one: a run may resume among the chosen steps."""
        self._ranges: list[record_function] = []
        """The ranges of the step and of the phase, in this order, while it records."""
        self._profiler: Any = None
        """While it records, or is about to."""

    def enter(self, phase: str) -> None:
        """End the phase before, and begin this one, and whatever begins or ends with it."""
        super().enter(phase)
        if self._is_over:
            return
        step = self._next_step()
        if step > self._last:
            self._why_not = "the attempt began behind these steps; set `profile.steps` to later ones"
            self.close()
        elif step >= self._first - 1:
            self._run_guarded(lambda: self._follow(step, phase))

    def close(self) -> None:
        """Write what has been recorded, and record no more."""
        if not self._is_over:
            self._is_over = True
            self._run_guarded(self._finish)

    def _follow(self, step: int, phase: str) -> None:
        self._prepare()
        # An evaluation and a save come after their step, and belong to it, though the next one is counted already.
        if step >= self._first and step != self._step and phase in STEP_BEGIN_PHASES:
            if not self._began_at:
                _refuse_second_profiler()
                self._profiler.start_trace()
                self._began_at = step
            self._end_ranges(0)
            self._step = step
            self._begin_range(f"step {step}")
        if self._began_at:
            self._end_ranges(1)
            self._begin_range(phase)

    def _finish(self) -> None:
        if not self._began_at:
            log.warning("no profile of steps %d to %d: %s", self._first, self._last, self._why_not)
        self._end_ranges(0)
        self._write()

    def _begin_range(self, name: str) -> None:
        one = record_function(name)
        one.__enter__()
        self._ranges.append(one)

    def _end_ranges(self, num_kept: int) -> None:
        while len(self._ranges) > num_kept:
            self._ranges.pop().__exit__(None, None, None)

    def _run_guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  the training matters more
            self._is_over = True
            self._ranges = []
            log.warning(
                "the profile of steps %d to %d cannot be recorded: %s: %s. The training goes on without it.",
                self._first,
                self._last,
                type(error).__name__,
                error,
            )

    def _prepare(self) -> None:
        # The step before the first one starts what PyTorch needs, which takes time and would stand in the trace.
        if self._profiler is None:
            _refuse_second_profiler()
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.prepare_trace()
            self._end_before_another()

    def _end_before_another(self) -> None:
        """Have this profile end when another profiler of this process begins, as a recipe's own: PyTorch crashes with two."""
        # All of PyTorch's profilers begin by this method; it has no public hook.
        prepare = AnyProfiler._prepare_trace  # noqa: SLF001

        def prepare_other(other: AnyProfiler) -> None:
            AnyProfiler._prepare_trace = prepare  # type: ignore[method-assign]  # noqa: SLF001
            if not self._is_over:
                self._why_not = "a profiler of the recipe begins before the first of these steps"
                log.warning("the profile ends before step %d, where a profiler of the recipe begins", self._next_step())
                self.close()
            prepare(other)  # type: ignore[no-untyped-call]

        AnyProfiler._prepare_trace = prepare_other  # type: ignore[method-assign]  # noqa: SLF001

    def _write(self) -> None:
        """Write what has been recorded, or let go of what was prepared."""
        profiler = self._profiler
        if profiler is None:
            return
        if not self._began_at:  # what was prepared has to be undone
            profiler.start_trace()
            profiler.stop_trace()
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else kernels that still run would be missing
        profiler.stop_trace()
        make_directories(self._trace.parent)
        # PyTorch compresses a file of this ending. What a killed process leaves is the next one's to replace.
        beside = self._trace.with_name(f".{os.getpid()}.{self._trace.name}")
        try:
            profiler.export_chrome_trace(str(beside))
            beside.chmod(new_file_mode(self._trace))
            beside.replace(self._trace)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
        by = "self_cuda_time_total" if self._device.type == "cuda" else "self_cpu_time_total"
        averages = profiler.key_averages()
        # A range, ours or a user's, would count the time of the kernels in it once more.
        averages[:] = [one for one in averages if not one.is_user_annotation]
        rows = averages.table(sort_by=by, row_limit=_MOST_ROWS, max_name_column_width=80)
        replace_text(self._table, f"steps {self._began_at} to {self._step}\n\n{rows}\n", durable=False)
        log.info("profile of steps %d to %d: %s", self._began_at, self._step, self._trace)


def _refuse_second_profiler() -> None:
    if torch.autograd._profiler_enabled():  # noqa: SLF001  nothing public says it
        raise RuntimeError("a profiler of the recipe runs, and PyTorch allows one at a time")
