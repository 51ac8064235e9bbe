"""The attempts of a run as rows of spans over one time axis. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_hpc.base.names import plural, shorten_names
from ddp_hpc.run.run_dir.timeline import Mark
from ddp_hpc.watch.attempt_times import AttemptTime
from ddp_hpc.watch.report.axes import clock_axis
from ddp_hpc.watch.report.words import duration, moment

MOST_ROWS = 40
_MOST_SAVES = 60
_ENDS = {
    "finished": "finished",
    "stopped": "stopped",
    "cancelled": "cancelled",
    "fenced": "replaced by a newer attempt of the run",
}


def rows_of(
    times: Sequence[AttemptTime], marks: Sequence[Mark]
) -> tuple[list[dict[str, Any]], list[tuple[float, str]]]:
    """Return the newest attempts as rows, oldest first, and the marks of their time axis, as `ChartAxis.ticks` has them."""
    shown = times[-MOST_ROWS:]
    if not shown:
        return [], []
    begin = min(min(one.queued_at or one.attempt.started_at, one.attempt.started_at) for one in shown)
    end = max([begin + 1.0, *(one.ended_at for one in shown)])
    axis = clock_axis(begin, end)
    return [
        _row(one, begin, end, [mark for mark in marks if mark.attempt == one.attempt.attempt]) for one in shown
    ], axis.ticks


def parts_of(time: AttemptTime) -> list[tuple[str, float, float]]:
    """Return kind, begin and end of the parts of an attempt that follow each other; saves are within training."""
    start, end = time.attempt.started_at, time.ended_at
    parts = [] if time.queued_at is None else [("queued", time.queued_at, start)]
    if time.trained_from is None or time.useful_until is None:
        kind = max(("starting", "lost", "unknown"), key=lambda one: time.seconds[one])
        return [*parts, (kind, start, end)]
    useful = min(max(time.useful_until, time.trained_from), end)
    found = [
        *parts,
        ("starting", start, time.trained_from),
        ("training", time.trained_from, useful),
        ("lost", useful, end),
    ]
    return [(kind, one, two) for kind, one, two in found if two > one]


def _steps_text(time: AttemptTime) -> str:
    if time.reached_step <= time.first_step:
        return "none"
    text = f"{time.first_step} to {time.reached_step}"
    if time.kept_step >= time.reached_step:
        return text
    return f"{text}, none kept" if time.kept_step <= time.first_step else f"{text}, kept to {time.kept_step}"


def _row(time: AttemptTime, begin: float, end: float, marks: Sequence[Mark]) -> dict[str, Any]:
    attempt, width = time.attempt, end - begin
    saves = [((mark.at - begin) / width, f"checkpoint of step {mark.step}") for mark in marks if mark.kind == "save"]
    names = attempt.nodes or [attempt.host]
    return {
        "number": attempt.attempt,
        "job": attempt.job_id if attempt.cluster == "slurm" else f"process {attempt.pid}",
        "nodes": shorten_names(names, 4),
        "started": moment(attempt.started_at),
        "ran": duration(time.length_s),
        "steps": _steps_text(time),
        "end": _end_text(time),
        "reason": attempt.reason or _end_text(time),
        "title": f"attempt {attempt.attempt}, {plural(time.num_nodes, 'node')}: {_end_text(time)}",
        "spans": [
            (kind, (one - begin) / width, (two - one) / width, f"{kind} {duration(two - one)}")
            for kind, one, two in parts_of(time)
        ],
        "saves": saves if len(saves) <= _MOST_SAVES else [],
    }


def _end_text(time: AttemptTime) -> str:
    if time.is_open:
        return "goes on"
    attempt = time.attempt
    if attempt.ending is None:
        return "killed; the chart ends it at its last sign of life"
    return _ENDS.get(attempt.ending, str(attempt.cause or attempt.ending))
