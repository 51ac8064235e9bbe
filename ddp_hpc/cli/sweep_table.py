"""The points of a sweep as a table: what each sets, how far it is, and what its evaluation gave."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ddp_hpc.base.discretion import escape_controls
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import plural
from ddp_hpc.cli.formatting import as_json, duration, named_numbers, number, or_dash, table
from ddp_hpc.cli.runs import slurm_asker
from ddp_hpc.cli.status_text import steps_text
from ddp_hpc.launch.sweep.point_states import PointReader, PointState
from ddp_hpc.launch.sweep.points import Point, key_labels
from ddp_hpc.launch.sweep.sweep_dir import find_sweep, is_being_sent, read_sweep
from ddp_hpc.watch.compare_runs import sort_runs
from ddp_hpc.watch.queue import Queue, queue_now

HEADER = ("POINT", "STATE", "STEP", "LOSS", "EVALUATION", "ATTEMPT", "AGE")
_FAILED_STATES = frozenset({"failed", "refused"})


Row = tuple[Point, PointState]
"""A point, and where it stands."""


def print_sweep(args: argparse.Namespace, runs_dir: Path, environment: Mapping[str, str]) -> int:
    """Print the table of one sweep."""
    sweep_dir = find_sweep(args.sweep, runs_dir)
    if args.filter or args.keys:
        raise ConfigError(
            f"`--filter` and `--keys` compare runs, not points of a sweep. Use `ddp-hpc list --runs-dir {sweep_dir.path}` with them."
        )
    sweep = read_sweep(sweep_dir)
    queue = queue_now(environment, time.time()) if sweep.arrays else Queue()
    states = PointReader(slurm_asker(environment)).read(sweep, queue, is_being_sent=is_being_sent(sweep_dir))
    every = [(point, states[point.number]) for point in sweep.points]
    rows = [(point, state) for point, state in every if state.word in _FAILED_STATES] if args.failed else every
    rows = _sorted_rows(rows, args.sort, is_reversed=args.reverse) if args.sort else rows[:: -1 if args.reverse else 1]
    if args.json:
        of_runs = [{} if state.status is None else asdict(state.status) for _, state in rows]
        of_points = [
            {"run": point.name, "state": state.word, "point": point.number, "set": point.shown_settings}
            for point, state in rows
        ]
        print(as_json([of_run | of_point for of_run, of_point in zip(of_runs, of_points, strict=True)]))
        return 0
    labels = key_labels([point.settings for point in sweep.points])
    print(table((*HEADER, *labels.values()), [_row_cells(point, state, list(labels)) for point, state in rows]))
    counts = Counter(state.word for _, state in every)
    print(f"{plural(len(every), 'point')}: {', '.join(f'{count:,} {state}' for state, count in counts.most_common())}")
    return 0


def _sorted_rows(rows: Sequence[Row], by: str, *, is_reversed: bool) -> list[Row]:
    """Return the points sorted by a swept key, a column or a metric; those without a value come last."""
    if any(by in point.settings for point, _ in rows):
        values = {point.name: value for point, _ in rows if (value := point.settings.get(by)) is not None}
        are_numbers = all(isinstance(value, (int, float)) for value in values.values())
        ordered = sorted(
            values, key=lambda name: values[name] if are_numbers else str(values[name]), reverse=is_reversed
        )
    else:
        listed = [state.status for _, state in rows if state.status is not None]
        ordered = [one.run for one in sort_runs(listed, by, is_reversed=is_reversed)]
    by_name = {point.name: (point, state) for point, state in rows}
    return [by_name[name] for name in dict.fromkeys([*ordered, *by_name])]


def _row_cells(point: Point, state: PointState, keys: Sequence[str]) -> tuple[str, ...]:
    status = state.status
    known = ("-",) * 5
    if status is not None:
        evaluation = or_dash(named_numbers(status.metrics))
        attempt, age = or_dash(status.attempt), duration(status.age_s)
        known = (steps_text(status), number(status.loss), evaluation, attempt, age)
    values = [point.shown_settings.get(key) for key in keys]
    texts = [one if isinstance(one, str) or one is None else json.dumps(one, default=str) for one in values]
    shown = [or_dash(text and escape_controls(text.replace("\n", "\\n"))) for text in texts]
    return (point.name, state.word, *known, *shown)
