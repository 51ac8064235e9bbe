"""The report on a sweep: one page with the points side by side, the best first, and what each key changes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.report import charts
from ddp_hpc.watch.report.axes import ChartAxis, axis
from ddp_hpc.watch.report.page import render_page
from ddp_hpc.watch.report.scatter import key_chart
from ddp_hpc.watch.report.series import Series, finite, read_losses
from ddp_hpc.watch.report.sweep_points import Goal, Settings, SweptRun, best_first, goal_of, read_points
from ddp_hpc.watch.report.words import compact, hours, plural, share

MOST_CHARTS = 60
"""So many points have a chart of their loss."""
_MOST_KEYS = 12
_MOST_FAILURES = 5
_BINS_OF_SMALL = 100
_FAILED = ("failed", "refused", "interrupted")
NOT_BEGUN = "not begun"


def sweep_page(name: str, runs: Sequence[tuple[RunDir, Settings]], *, now: float) -> str:
    """Return the page of a sweep, by the runs of its points and what each sets."""
    found, unreadable = read_points(runs, now=now)
    goal = goal_of(found)
    points = best_first(found, goal)
    losses = [_losses(one.run) for one in points[:MOST_CHARTS]]
    return render_page(
        "sweep.html.j2",
        _view(name, points, goal, losses, unreadable, num_points=len(runs)),
        title=f"{name}: report",
        path=runs[0][0].path.parent if runs else name,
        now=now,
    )


def _losses(run: RunDir) -> Series:
    try:
        return read_losses(run, num_bins=_BINS_OF_SMALL)
    except OSError:  # its row is there
        return Series()


def _view(  # noqa: PLR0913, PLR0917  what was read, part by part
    name: str,
    points: Sequence[SweptRun],
    goal: Goal,
    losses: Sequence[Series],
    unreadable: Sequence[str],
    num_points: int,
) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for one in points for key in one.sets))
    metrics = list(dict.fromkeys(metric for one in points for metric in one.status.metrics))
    states = [*(one.status.state for one in points), *[NOT_BEGUN] * (num_points - len(points) - len(unreadable))]
    counts = Counter(states).most_common()
    by_key = [chart for key in keys[:_MOST_KEYS] if (chart := _key_chart(key, points, goal)) is not None]
    x, y = _shared_axes(losses)
    small = [
        charts.chart_of(_sets(one), lines, x=x, y=y)
        for one, series in zip(points, losses, strict=False)
        if (lines := charts.loss_lines(series))
    ]
    missing = [*unreadable]
    if len(points) > MOST_CHARTS:
        missing.append(f"Only the best {MOST_CHARTS} points have a chart of their loss; the table has all.")
    if len(keys) > _MOST_KEYS:
        missing.append(f"Only the first {_MOST_KEYS} of {len(keys)} keys have a chart; the table has all.")
    return {
        "name": name,
        "lead": f"{plural(num_points, 'point')}: {', '.join(f'{count} {state}' for state, count in counts)}.",
        "missing": missing,
        "states": [(state, count, count / num_points) for state, count in counts],
        "failures": _failures(points),
        "goal": goal,
        "best": _best(points, goal),
        "keys": keys,
        "metrics": metrics,
        "rows": [_row(one, keys, metrics) for one in points],
        "by_key": by_key,
        "small": small,
    }


def _shared_axes(runs: Sequence[Series]) -> tuple[ChartAxis, ChartAxis]:
    """Return axes for the losses of several runs; a run that diverges does not flatten the others, but leaves the box."""
    losses = [points for one in runs if (points := finite(one.loss))]
    steps = axis([0.0, 1.0, *(points[-1].step for points in losses)], margin=0.0, count=3)
    highest = sorted(max(point.value for point in points) for points in losses)
    values = [min(point.value for points in losses for point in points), highest[len(highest) // 2]] if losses else []
    return steps, axis(values, may_be_log=True)


def _best(points: Sequence[SweptRun], goal: Goal) -> str:
    value = goal.value(points[0]) if points else None
    if value is None:
        return ""
    state = points[0].status.state
    return f"Best {goal.words}: {compact(value)}, {points[0].name} ({'' if state == 'finished' else f'{state}; '}{_sets(points[0])})."


def _sets(point: SweptRun) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.sets.items()) or point.name


def _key_chart(key: str, points: Sequence[SweptRun], goal: Goal) -> charts.Chart | None:
    measured = [
        (one.sets[key], value, one.name) for one in points if key in one.sets and (value := goal.value(one)) is not None
    ]
    return key_chart(key, goal.metric, measured, is_highest=goal.is_highest)


def _failures(points: Sequence[SweptRun]) -> list[tuple[str, str, str]]:
    """Put points together that failed in the same way, the most frequent way first: how many, why, and some names."""
    alike: Mapping[str, list[SweptRun]] = defaultdict(list)
    for one in points:
        if one.status.state in _FAILED:
            alike[one.status.fingerprint or one.status.reason].append(one)
    ordered = sorted(alike.values(), key=len, reverse=True)[:_MOST_FAILURES]
    return [
        (
            plural(len(same), "point"),
            same[0].status.reason or same[0].status.state,
            ", ".join(one.name for one in same[:3]) + (" ..." if len(same) > 3 else ""),
        )
        for same in ordered
    ]


def _row(point: SweptRun, keys: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    status, goodput = point.status, point.goodput
    node_hours = sum(value for kind, value in goodput.node_hours.items() if kind != "queued")
    return {
        "name": point.name,
        "state": status.state,
        "sets": [str(point.sets.get(key, "")) for key in keys],
        "numbers": [
            (f"{status.step:,}", status.step),
            _cell(status.loss, compact),
            *(_cell(status.metrics.get(metric), compact) for metric in metrics),
            _cell(goodput.goodput, share),
            (hours(node_hours), round(node_hours, 5)),
        ],
    }


def _cell(value: float | None, text: Callable[[float], str]) -> tuple[str, float | str]:
    """Return a number of the table, and by what the table is sorted: empty where it is not known."""
    if value is None or not math.isfinite(value):
        return "-", ""
    return text(value), float(f"{value:.6g}")
