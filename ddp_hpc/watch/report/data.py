"""All that a report shows of one run, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hpc.run.checkpoints.save_interval import SaveInterval
from ddp_hpc.run.run_dir.joined_ranks import RendezvousRecord
from ddp_hpc.run.run_dir.machine_use import MachineUse, merge_uses
from ddp_hpc.run.run_dir.software_versions import Environment
from ddp_hpc.run.run_dir.timeline import Mark, RankComparison, SlowRankAlarm
from ddp_hpc.watch.attempt_times import AttemptTime
from ddp_hpc.watch.checkpoints import CheckpointInfo
from ddp_hpc.watch.goodput import Goodput
from ddp_hpc.watch.report.series import Series
from ddp_hpc.watch.status import RunStatus
from ddp_hpc.watch.why.findings import Verdict


@dataclass(frozen=True, kw_only=True)
class RunData:
    """One run."""

    path: Path
    status: RunStatus
    times: Sequence[AttemptTime]
    goodput: Goodput
    saves: SaveInterval | None
    """With `checkpoint.every_steps=auto`: how often it saves, and what that costs."""
    series: Series
    marks: Sequence[Mark]
    looks: Sequence[RankComparison]
    alarms: Sequence[SlowRankAlarm]
    meetings: Mapping[int, RendezvousRecord]
    """Attempt -> where its ranks met."""
    checkpoints: Sequence[CheckpointInfo]
    environments: Mapping[int, Environment]
    failure: tuple[int, Verdict, str] | None
    """The newest attempt that failed, why, and what to do."""
    values: Mapping[str, Any]
    """Key -> value of the configuration."""
    machines: Mapping[int, Sequence[MachineUse]] = field(default_factory=dict)
    """Attempt -> how busy its nodes were."""
    missing: Sequence[str] = field(default_factory=list)
    """What is not shown, why, and how to get it."""
    secrets: Sequence[str] = ()
    """Values that are masked wherever they stand."""

    @property
    def phases(self) -> tuple[Mapping[str, float], int]:
        """Seconds of rank zero in each phase, over all attempts, and the number of steps."""
        newest = {mark.attempt: mark for mark in self.marks if mark.kind == "phases"}
        seconds: dict[str, float] = {}
        for mark in newest.values():
            for name, one in mark.phases.items():
                seconds[name] = seconds.get(name, 0.0) + one
        return seconds, sum(mark.num_steps or 0 for mark in newest.values())

    @property
    def is_failure_newest(self) -> bool:
        """Whether no attempt followed the one that failed."""
        return self.failure is not None and self.failure[0] == self.times[-1].attempt.attempt

    @property
    def starts(self) -> Mapping[int, int]:
        """Attempt -> the step at which its training began."""
        return {one.attempt.attempt: one.first_step for one in self.times if one.trained_from is not None}

    def share_of(self, kind: str) -> float:
        """Return which share of the nodes' time that is known was of this kind."""
        known_h = self.goodput.running_h - self.goodput.node_hours["unknown"]
        return self.goodput.node_hours[kind] / known_h if known_h else 0.0

    def phase_share(self, name: str) -> float:
        """Return which share of rank zero's steps a phase took."""
        seconds, _ = self.phases
        return seconds.get(name, 0.0) / (sum(seconds.values()) or 1.0)

    def number(self, key: str) -> float:
        """Return the value of a key; NaN unless it is a number."""
        value = self.values.get(key)
        return float(value) if isinstance(value, (int, float)) else math.nan

    @property
    def use_in_training(self) -> MachineUse | None:
        """How busy all nodes were since training began; since workers began where that is not known, as of a script."""
        begun = {mark.attempt: mark.at for mark in self.marks if mark.kind == "begin"}
        return merge_uses(
            [
                use
                for attempt, uses in self.machines.items()
                for use in uses
                if use.at - use.seconds >= begun.get(attempt, -math.inf) - 1.0
            ]
        )
