"""How busy the nodes of a run were: a chart over time, a sentence, and the numbers that notes may name. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ddp_hpc.run.run_dir.machine_use import MachineUse, in_words, merged
from ddp_hpc.watch.report.axes import axis, clock_times
from ddp_hpc.watch.report.charts import GAP, Chart, Line, chart_of
from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.series import ChartPoint, finite

_MOST_POINTS = 240
"""What all nodes report of one part of the time is one point."""
_CURVES: Sequence[tuple[str, str, Callable[[MachineUse], float | None]]] = (
    ("line", "GPUs busy, the mean of all", lambda use: use.gpu_busy),
    ("cpu", "CPUs busy, the mean of those that the job may use", lambda use: use.cpu_busy),
)


def _all(run: RunData) -> list[MachineUse]:
    return [use for uses in run.machines.values() for use in uses]


def _in_training(run: RunData) -> list[MachineUse]:
    """Return the records of all attempts from the moment when training began; all records where that is not known, as of a script."""
    begun = {mark.attempt: mark.at for mark in run.marks if mark.kind == "begin"}
    return [
        use
        for attempt, uses in run.machines.items()
        for use in uses
        if use.at - use.seconds >= begun.get(attempt, -math.inf) - 1.0
    ]


def facts_of_machines(run: RunData) -> Mapping[str, float]:
    """Return the numbers by their names in `notes.Facts`, where they are known."""
    use = merged(_in_training(run))
    if use is None:
        return {}
    known = {
        "measured_s": use.seconds,
        "gpu_busy": use.gpu_busy,
        "gpu_memory_share": use.gpu_memory_share,
        "cpu_busy": use.cpu_busy,
        "cpus_of_node": use.num_cpus,
        "memory_share": max((one.memory_share or 0.0 for one in _all(run)), default=None),
    }
    return {name: value for name, value in known.items() if value is not None}


def about_machines(run: RunData) -> str:
    """Return a sentence on the whole run; empty where nothing was measured."""
    use = merged(_in_training(run) or _all(run))
    since = "Since training began" if _in_training(run) and run.marks else "While the workers ran"
    return "" if use is None else f"{since}, on average (memory: at most): {'; '.join(in_words(use))}."


def machine_chart(run: RunData) -> Chart | None:
    """Return the chart of the shares of GPUs and CPUs that were busy; None where nothing was measured."""
    uses = _all(run)
    if not uses:
        return None
    x = clock_times(min(use.at - use.seconds for use in uses), max(use.at for use in uses))
    points = [_points(of_attempt, (x.high - x.low) / _MOST_POINTS) for of_attempt in run.machines.values()]
    lines = [
        Line(kind, [point for uses in points for point in (*_shares(uses, value), GAP)], title)
        for kind, title, value in _CURVES
    ]
    if not any(finite(line.points) for line in lines):
        return None
    return chart_of("GPUs and CPUs", lines, unit="% busy", x=x, y=axis([0, 100], margin=0.0))


def _shares(uses: Sequence[MachineUse], value: Callable[[MachineUse], float | None]) -> list[ChartPoint]:
    return [ChartPoint(use.at, 100 * one) for use in uses if (one := value(use)) is not None]


def _points(uses: Sequence[MachineUse], width_s: float) -> list[MachineUse]:
    """Merge the records of one attempt that end within one part of the time."""
    parts: dict[int, list[MachineUse]] = {}
    for use in uses:
        parts.setdefault(int(use.at // max(width_s, 60.0)), []).append(use)
    return [*filter(None, (merged(part) for _, part in sorted(parts.items())))]
