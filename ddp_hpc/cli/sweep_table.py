"""The points of a sweep as a table: what each sets, how far it is, and what its evaluation gave."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_hpc.base.discretion import visible
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.formatting import as_json, duration, number, numbers, or_dash, table
from ddp_hpc.cli.runs import slurm_asker
from ddp_hpc.cli.status_text import steps
from ddp_hpc.launch.sweep.point_states import PointReader
from ddp_hpc.launch.sweep.points import Point, labels_of
from ddp_hpc.launch.sweep.sweep_dir import find_sweep, is_being_sent, read_sweep
from ddp_hpc.watch.compare import ListedRun, sort_runs
from ddp_hpc.watch.queue import Queue, queue_now
from ddp_hpc.watch.report.words import plural
from ddp_hpc.watch.status import RunStatus

HEADER = ("POINT", "STATE", "STEP", "LOSS", "EVALUATION", "ATTEMPT", "AGE")
_FAILED = frozenset({"failed", "refused"})


@dataclass(frozen=True)
class PointRow:
    """A point, and the status of its run; None where it has none yet."""

    point: Point
    state: str
    status: RunStatus | None


def print_sweep(args: argparse.Namespace, runs_dir: Path, environment: Mapping[str, str]) -> int:
    """Print the table of one sweep."""
    sweep_dir = find_sweep(args.sweep, runs_dir)
    if args.filter or args.keys:
        raise ConfigError(
            f"`--filter` and `--keys` compare runs, not points of a sweep. Use `ddp-hpc list --runs-dir {sweep_dir.path}` with them."
        )
    sweep = read_sweep(sweep_dir)
    queue = queue_now(environment, time.time()) if sweep.arrays else Queue()
    states = PointReader(sweep_dir, slurm_asker(environment)).read(sweep, queue, is_being_sent=is_being_sent(sweep_dir))
    every = [PointRow(point, states[point.number].word, states[point.number].status) for point in sweep.points]
    rows = [row for row in every if row.state in _FAILED] if args.failed else every
    rows = _sorted(rows, args.sort, is_reversed=args.reverse) if args.sort else rows[:: -1 if args.reverse else 1]
    if args.json:
        print(
            as_json(
                [
                    {
                        **({} if row.status is None else asdict(row.status)),
                        "run": row.point.name,
                        "state": row.state,
                        "point": row.point.number,
                        "set": row.point.shown,
                    }
                    for row in rows
                ]
            )
        )
        return 0
    labels = labels_of([row.point for row in every])
    print(table((*HEADER, *labels.values()), [_cells(row, list(labels)) for row in rows]))
    counts = Counter(row.state for row in every)
    print(f"{plural(len(every), 'point')}: {', '.join(f'{count:,} {state}' for state, count in counts.most_common())}")
    return 0


def _sorted(rows: Sequence[PointRow], by: str, *, is_reversed: bool) -> list[PointRow]:
    """Return the points sorted by a swept key, a column or a metric; those without a value come last."""
    begun = {row.point.name: row for row in rows if row.status is not None}
    if any(by in row.point.settings for row in rows):
        known = [row for row in rows if row.point.settings.get(by) is not None]
        are_numbers = all(isinstance(row.point.settings[by], (int, float)) for row in known)
        ordered = sorted(
            known,
            key=lambda row: row.point.settings[by] if are_numbers else str(row.point.settings[by]),
            reverse=is_reversed,
        )
    else:
        listed = [ListedRun(row.status) for row in begun.values() if row.status is not None]
        ordered = [begun[one.status.run] for one in sort_runs(listed, by, is_reversed=is_reversed)]
    are_ordered = {row.point.name for row in ordered}
    return [*ordered, *(row for row in rows if row.point.name not in are_ordered)]


def _cells(row: PointRow, keys: Sequence[str]) -> tuple[str, ...]:
    status = row.status
    known = ("-",) * 5
    if status is not None:
        evaluation = or_dash(numbers(status.metrics))
        attempt, age = or_dash(status.attempt), duration(status.age_s)
        known = (steps(status), number(status.loss), evaluation, attempt, age)
    values = [row.point.shown.get(key) for key in keys]
    texts = [one if isinstance(one, str) or one is None else json.dumps(one, default=str) for one in values]
    shown = [or_dash(text and visible(text.replace("\n", "\\n"))) for text in texts]
    return (row.point.name, row.state, *known, *shown)
