"""The report on a sweep: one page with the points side by side, the best first, and what each key changes."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_hpc.base.discretion import secret_values
from ddp_hpc.base.names import plural, shorten_names
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.compare_runs import config_values
from ddp_hpc.watch.report import charts
from ddp_hpc.watch.report.axes import ChartAxis, axis
from ddp_hpc.watch.report.page import render_page
from ddp_hpc.watch.report.series import ChartPoint, Series, finite_points, read_losses
from ddp_hpc.watch.report.sweep_points import Goal, Settings, SweptRun, best_first, goal_of, read_points
from ddp_hpc.watch.report.words import compact, hours, share

MOST_CHARTS = 60
"""So many points have a chart of their loss."""
_MOST_KEYS = 12
_MOST_FAILURES = 5
_SMALL_CHART_BINS = 100
_MOST_LABELS, _FEW_LABELS = 6, 4
_LONGEST_LABEL = 14
_FAILED = ("failed", "refused", "interrupted")
NOT_BEGUN = "not begun"


def sweep_page(name: str, runs: Sequence[tuple[RunDir, Settings]], *, now: float, environ: Mapping[str, str]) -> str:
    """Return the page of a sweep, by the runs of its points and what each sets; of what may be secret, as `read_run` does."""
    found, unreadable = read_points(runs, now=now)
    goal = goal_of(found)
    points = best_first(found, goal)
    losses = []
    for one in points[:MOST_CHARTS]:
        try:
            losses.append(read_losses(one.run, num_bins=_SMALL_CHART_BINS))
        except OSError:  # its row is there
            losses.append(Series())
    view = _view(name, points, goal, losses, unreadable, num_points=len(runs))
    secrets = [one for point in found for one in secret_values(config_values(point.run), environ)]
    path = runs[0][0].path.parent if runs else name
    return render_page("sweep.html.j2", {"path": path, **view}, now=now, secrets=secrets)


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
    valued = [(one, value) for one in points if (value := goal.value(one)) is not None]
    measured = {
        key: [(one.sets[key], value, one.name) for one, value in valued if key in one.sets] for key in keys[:_MOST_KEYS]
    }
    by_key = [chart for key, found in measured.items() if (chart := key_chart(key, goal.metric, found)) is not None]
    x, y = _shared_axes(losses)
    small = [
        charts.Chart(_settings_text(one), lines, x, y)
        for one, series in zip(points, losses, strict=False)
        if (lines := charts.loss_lines(series))
    ]
    best = ""
    if valued:
        first, value = valued[0]
        state = "" if first.status.state == "finished" else f"{first.status.state}; "
        best = f"Best {goal.goal_text}: {compact(value)}, {first.name} ({state}{_settings_text(first)})."
    missing = [*unreadable]
    if len(points) > MOST_CHARTS:
        missing.append(f"Only the best {MOST_CHARTS} points have a chart of their loss; the table has all.")
    if len(keys) > _MOST_KEYS:
        missing.append(f"Only the first {_MOST_KEYS} of {len(keys)} keys have a chart; the table has all.")
    return {
        "title": f"{name}: report",
        "name": name,
        "lead": f"{plural(num_points, 'point')}: {', '.join(f'{count} {state}' for state, count in counts)}.",
        "missing": missing,
        "states": [(state, count, count / num_points) for state, count in counts],
        "failures": _failures(points),
        "goal": goal,
        "best": best,
        "keys": keys,
        "metrics": metrics,
        "rows": [_row(one, keys, metrics) for one in points],
        "by_key": by_key,
        "small": small,
    }


def _shared_axes(runs: Sequence[Series]) -> tuple[ChartAxis, ChartAxis]:
    """Return axes for the losses of several runs; a run that diverges does not flatten the others, but leaves the box."""
    losses = [points for one in runs if (points := finite_points(one.loss))]
    steps = axis([0.0, 1.0, *(points[-1].step for points in losses)], margin=0.0, count=3)
    highest = sorted(max(point.value for point in points) for points in losses)
    values = [min(point.value for points in losses for point in points), highest[len(highest) // 2]] if losses else []
    return steps, axis(values, may_be_log=True)


def _settings_text(point: SweptRun) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in point.sets.items()) or point.name


def key_chart(key: str, metric: str, measured: Sequence[tuple[Any, float, str]]) -> charts.Chart | None:
    """Return the chart of a metric against a key, whose values are side by side; None where all points have the same value of it.

    `measured`: of each point its value of the key, the metric, and its name, the best first. A dot is one point; a line goes through the
    best of each value.
    """
    named = [(value if isinstance(value, str) else json.dumps(value, default=str), one) for value, one, _ in measured]
    values = {text: value for (text, _), (value, _, _) in zip(named, measured, strict=True)}
    if len(values) < 2:
        return None
    are_numbers = all(type(one) in {int, float} and math.isfinite(one) for one in values.values())
    texts = sorted(values, key=values.__getitem__) if are_numbers else [*values]
    at = {text: number + 0.5 for number, text in enumerate(texts)}
    shown = [compact(values[text]) if are_numbers else text for text in texts]
    short = [text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..." for text in shown]
    every = 1 if len(texts) <= _MOST_LABELS else -(-len(texts) // _FEW_LABELS)
    marks = {at[text]: label for text, label in list(zip(texts, short, strict=True))[::every]}
    dots = dict.fromkeys(ChartPoint(at[text], one) for text, one in named)
    lines = [
        charts.Line("points", [one for dot in dots for one in (dot, charts.GAP)], "a dot for each point of the sweep")
    ]
    if len(texts) < len(named):
        best = dict(reversed(named))
        through = [ChartPoint(at[text], best[text]) for text in texts]
        lines.append(charts.Line("line", through, f"the best {metric} of each value"))
    text, value = named[0]
    about = f"the best, {measured[0][2]}: {key} {text}, {metric} {compact(value)}"
    lines.append(charts.Line("best", [ChartPoint(at[text], value)], about))
    y = axis((one for _, one in named), may_be_log=True)
    return charts.Chart(key, lines, ChartAxis(0.0, float(len(texts)), marks), y)


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
            shorten_names([one.name for one in same], 3),
        )
        for same in ordered
    ]


def _row(point: SweptRun, keys: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    status, goodput = point.status, point.goodput
    return {
        "name": point.name,
        "state": status.state,
        "sets": [str(point.sets.get(key, "")) for key in keys],
        "numbers": [
            (f"{status.step:,}", status.step),
            _cell(status.loss, compact),
            *(_cell(status.metrics.get(metric), compact) for metric in metrics),
            _cell(goodput.goodput, share),
            (hours(goodput.running_h), round(goodput.running_h, 5)),
        ],
    }


def _cell(value: float | None, text: Callable[[float], str]) -> tuple[str, float | str]:
    """Return a number of the table, and by what the table is sorted: empty where it is not known."""
    if value is None or not math.isfinite(value):
        return "-", ""
    return text(value), float(f"{value:.6g}")
