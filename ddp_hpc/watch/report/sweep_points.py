"""Reads of each point of a sweep what the sweep's page shows of it: there may be thousands of points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.compare_runs import config_values
from ddp_hpc.watch.goodput import Goodput, goodput_of
from ddp_hpc.watch.status import RunStatus, read_status

Settings = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One point of a sweep that has begun."""

    run: RunDir
    sets: Settings
    status: RunStatus
    goodput: Goodput

    @property
    def name(self) -> str:
        return self.run.name


@dataclass(frozen=True, kw_only=True)
class Goal:
    """By what the points are compared."""

    metric: str
    is_highest: bool = False
    """Whether the highest value is best."""
    is_evaluated: bool = True
    """Whether it is a metric of evaluations; else it is the loss of the training."""

    def value(self, point: SweptRun) -> float | None:
        """Return the newest value of a point; None where it has none, or one that is not finite."""
        value = point.status.metrics.get(self.metric) if self.is_evaluated else point.status.loss
        return value if value is not None and math.isfinite(value) else None

    @property
    def goal_text(self) -> str:
        return f"{self.metric} of the {'evaluation' if self.is_evaluated else 'training'}"


def read_points(runs: Iterable[tuple[RunDir, Settings]], *, now: float) -> tuple[list[SweptRun], list[str]]:
    """Return the points that have begun, and a sentence on each that cannot be read."""
    found: list[SweptRun] = []
    unreadable: list[str] = []
    for run, sets in runs:
        try:
            if run.config.is_file():
                status = read_status(run, now=now)
                goodput = goodput_of(read_times(run, now=now, is_alive=status.is_alive))
                found.append(SweptRun(run=run, sets=sets, status=status, goodput=goodput))
        except (OSError, UnreadableError) as error:
            unreadable.append(f"{run.name} cannot be read: {error}")
    return found, unreadable


def goal_of(points: Sequence[SweptRun]) -> Goal:
    """Return by what the points are compared: `checkpoint.best_metric` where some point has it, else the loss."""
    values = config_values(points[0].run) if points else {}
    metric = str(values.get("checkpoint.best_metric", "loss"))
    if metric != "loss" and any(metric in one.status.metrics for one in points):
        return Goal(metric=metric, is_highest=values.get("checkpoint.best_is") == "highest")
    return Goal(metric="loss", is_evaluated=any("loss" in one.status.metrics for one in points))


def best_first(points: Sequence[SweptRun], goal: Goal) -> list[SweptRun]:
    """Return the points, the best first, and of equals the finished ones; those without a value come last."""

    def place(point: SweptRun) -> tuple[bool, float, bool]:
        value = goal.value(point)
        measure = 0.0 if value is None else -value if goal.is_highest else value
        return value is None, measure, point.status.state != "finished"

    return sorted(points, key=place)
