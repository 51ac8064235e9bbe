"""The report on a sweep: one page with the points side by side, and what each sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_hpc.errors import UnreadableError
from ddp_hpc.report import charts
from ddp_hpc.report.axes import compact
from ddp_hpc.report.page import render_page
from ddp_hpc.report.series import Series, read_series
from ddp_hpc.report.words import hours, plural, share
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.goodput import Goodput, goodput_of
from ddp_hpc.watch.status import RunStatus, read_status

MOST_CHARTS = 60


@dataclass(frozen=True, kw_only=True)
class SweptRun:
    """One point of a sweep."""

    name: str
    sets: Mapping[str, object]
    status: RunStatus
    goodput: Goodput
    series: Series


def sweep_page(name: str, runs: Sequence[tuple[RunDir, Mapping[str, object]]], *, now: float) -> str:
    """Return the page of a sweep, by the runs of its points and what each sets."""
    found, unreadable = [], []
    for run, sets in runs:
        if not run.config.is_file():
            continue
        try:
            found.append(_read(run, sets, now))
        except (OSError, UnreadableError) as error:
            unreadable.append(f"{run.name} cannot be read: {error}")
    return render_page(
        "sweep.html.j2",
        _view(name, found, unreadable, num_points=len(runs)),
        title=f"{name}: report",
        path=runs[0][0].path.parent if runs else name,
        now=now,
    )


def _read(run: RunDir, sets: Mapping[str, object], now: float) -> SweptRun:
    status = read_status(run, now=now)
    times = read_times(run, now=now, is_alive=status.is_alive)
    return SweptRun(name=run.name, sets=sets, status=status, goodput=goodput_of(times), series=read_series(run))


def _view(name: str, runs: Sequence[SweptRun], unreadable: Sequence[str], *, num_points: int) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for run in runs for key in run.sets))
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.status.metrics))
    ends = [run.series.loss[-1].value for run in runs if run.series.loss]
    highest = max((point.value for run in runs for point in run.series.loss), default=1.0)
    small = []
    for run in runs[:MOST_CHARTS]:
        chart = charts.loss_chart(run.series, {})
        if chart is not None:
            small.append(
                (run.name, ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in run.sets.items()), chart)
            )
    states = [*(run.status.state for run in runs), *["not begun"] * (num_points - len(runs) - len(unreadable))]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return {
        "name": name,
        "lead": f"{plural(num_points, 'point')}: {counts}.",
        "missing": [
            *unreadable,
            *(
                [f"Only the first {MOST_CHARTS} points have a chart; the table has all."]
                if len(runs) > MOST_CHARTS
                else []
            ),
        ],
        "keys": keys,
        "metrics": metrics,
        "rows": [_row(run, keys, metrics) for run in runs],
        "small": small,
        "best": min(ends, default=None),
        "highest": highest,
    }


def _row(run: SweptRun, keys: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    status = run.status
    return {
        "name": run.name,
        "state": status.state,
        "sets": [str(run.sets.get(key, "")) for key in keys],
        "step": f"{status.step:,}",
        "loss": "-" if status.loss is None else compact(status.loss),
        "metrics": ["-" if (value := status.metrics.get(metric)) is None else compact(value) for metric in metrics],
        "goodput": share(run.goodput.goodput),
        "hours": hours(sum(value for kind, value in run.goodput.node_hours.items() if kind != "queued")),
    }
