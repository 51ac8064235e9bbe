"""How busy the machines of a run were: a chart over time, a sentence, and the numbers that notes may name. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from ddp_hpc.run.run_dir.machine_use import MachineUse, Summary, summary_of
from ddp_hpc.run.run_dir.machine_words import sentence
from ddp_hpc.watch.report.axes import Axis, clock_times, linear
from ddp_hpc.watch.report.charts import Chart, Curve, path
from ddp_hpc.watch.report.data import RunData
from ddp_hpc.watch.report.series import Point

_MOST_COLUMNS = 240
"""Parts of the time; what all nodes report of one part is one point."""


def in_training(run: RunData) -> list[MachineUse]:
    """Return the lines of all attempts from the moment when training began; all lines where that is not known, as of a script."""
    begun = {mark.attempt: mark.at for mark in run.marks if mark.kind == "begin"}
    return [
        use
        for attempt, uses in run.machines.items()
        for use in uses
        if use.at - use.seconds >= begun.get(attempt, -math.inf) - 1.0
    ]


def facts_of_machines(run: RunData) -> Mapping[str, float]:
    """Return the numbers by their names in `notes.Facts`, where they are known."""
    use = summary_of(in_training(run))
    if use is None:
        return {}
    throttled = None if use.throttled is None or not use.num_cpus else use.throttled * use.num_nodes / use.num_cpus
    known = {
        "measured_s": use.seconds,
        "gpu_busy": use.gpu_busy,
        "gpu_memory_share": use.gpu_memory_share,
        "cpu_busy": use.cpu_busy,
        "cpus_of_node": None if use.num_cpus is None else use.num_cpus / use.num_nodes,
        "throttled_share": throttled,
        "memory_share": None if use.is_memory_of_node else use.memory_share,
    }
    return {name: value for name, value in known.items() if value is not None}


def about_machines(run: RunData) -> str:
    """Return a sentence on the whole run; empty where nothing was measured."""
    use: Summary | None = summary_of(in_training(run) or [use for uses in run.machines.values() for use in uses])
    since = "Since training began" if in_training(run) and run.marks else "While the workers ran"
    return "" if use is None else f"{since}, on average (memory: at most): {sentence(use)}."


def machine_chart(run: RunData) -> Chart | None:
    """Return the chart of the shares of GPUs and CPUs that were busy; None where nothing was measured."""
    uses = [use for of_attempt in run.machines.values() for use in of_attempt]
    if not uses:
        return None
    x = clock_times(min(use.at - use.seconds for use in uses), max(use.at for use in uses))
    y = linear(0.0, 100.0, count=4)
    curves = [
        Curve(kind, drawn, title) for kind, title, value in _CURVES if (drawn := _drawn(run.machines, value, x, y))
    ]
    return Chart(title="GPUs and CPUs", unit="% busy", x=x, y=y, curves=curves) if curves else None


_CURVES: Sequence[tuple[str, str, Callable[[Summary], float | None]]] = (
    ("main", "GPUs busy, the mean of all", lambda use: use.gpu_busy),
    ("cpu", "CPUs busy, the mean of those that the job may use", lambda use: use.cpu_busy),
)


def _drawn(
    machines: Mapping[int, Sequence[MachineUse]], value: Callable[[Summary], float | None], x: Axis, y: Axis
) -> str:
    """Return one line for each attempt; what is not known interrupts it."""
    lines: list[list[Point]] = [[]]
    for uses in machines.values():
        lines.append([])
        for at, column in _columns(uses, (x.high - x.low) / _MOST_COLUMNS):
            share = value(column)
            if share is None:
                lines.append([])
            else:
                lines[-1].append(Point(at, min(100.0, share * 100)))
    return " ".join(path(line, x, y) for line in lines if line)


def _columns(uses: Sequence[MachineUse], width_s: float) -> list[tuple[float, Summary]]:
    """Put the lines of one attempt together that end within one part of the time; return the middle of each, and what they say."""
    parts: dict[int, list[MachineUse]] = {}
    for use in uses:
        parts.setdefault(int(use.at // max(width_s, 1.0)), []).append(use)
    found = [(part, summary) for _, part in sorted(parts.items()) if (summary := summary_of(part)) is not None]
    return [(sum(use.at - use.seconds / 2 for use in part) / len(part), summary) for part, summary in found]
