"""Notes where the time of an attempt goes: a few small lines in the run directory, written by rank zero."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from ddp_hpc.base.durable import open_private
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Mark, MarkKind, as_line
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recording.phase_times import PhaseTimes

MIN_PAUSE_S = 2.0
"""The shortest time between two lines on the phases."""
PAUSE_AGE_SHARE = 0.01
"""That time grows with the attempt, to this share of its age, so that a week has about 1,200 lines of 250 bytes."""


class Timeline:
    """The notes of one attempt, from `begin` on. A note that the disk refuses is left out: the training goes on."""

    def __init__(self, run: RunDir, attempt: int, group: Group, phases: PhaseTimes) -> None:
        self._run = run
        self._attempt = attempt
        self._group = group
        self._phases = phases
        self._before: Mapping[str, float] = {}
        self._began_at = self._looked_at = time.time()
        self._fd: int | None = None

    def note_begin(self, step: int) -> None:
        """Note that the training state is there, and training begins after `step`."""
        self._began_at = self._looked_at = time.time()
        self._before = self._phases.times_so_far().seconds
        with suppress(OSError):
            with open_private(self._run.timeline, "ab") as file:
                self._fd = os.dup(file.fileno())
            world_size = self._group.rank_info.world_size
            num_gpus = world_size if self._group.device.type == "cuda" else 0
            self._note("begin", step, self._began_at, world_size=world_size, num_gpus=num_gpus)

    def note_phases(self, step: int, *, now: bool = False) -> None:
        """Note the time in each phase, if it was not noted recently, or `now`."""
        at = time.time()
        if not now and at - self._looked_at < max(MIN_PAUSE_S, PAUSE_AGE_SHARE * (at - self._began_at)):
            return
        self._looked_at = at
        so_far = self._phases.times_so_far()
        seconds = {name: round(one - self._before.get(name, 0.0), 4) for name, one in so_far.seconds.items()}
        self._note("phases", step, at, num_steps=so_far.num_steps, phases=seconds)

    def note_duration(self, kind: Literal["save", "evaluation"], step: int, seconds: float) -> None:
        """Note a committed checkpoint or an evaluation that has just ended; the checkpoint writer's thread calls this, too."""
        self._note(kind, step, time.time(), seconds=round(seconds, 4))

    def note_interval(self, step: int, interval: Mapping[str, float]) -> None:
        """Note a new interval between checkpoints, and the numbers that it was chosen by."""
        self._note("interval", step, time.time(), interval=interval)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _note(self, kind: MarkKind, step: int, at: float, **more: Any) -> None:
        if self._fd is not None:
            # One write(2) with O_APPEND: two threads never mix their lines. The line break before it ends what a killed writer
            # may have left incomplete.
            with suppress(OSError):
                os.write(self._fd, b"\n" + as_line(Mark(kind=kind, attempt=self._attempt, at=at, step=step, **more)))
