"""List the runs, the newest last."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

from ddp_hpc.cli.runs import add_runs_dir, chosen_runs_dir
from ddp_hpc.cli.standing import steps
from ddp_hpc.cli.words import as_json, duration, number, numbers, or_dash, table
from ddp_hpc.errors import UnreadableError
from ddp_hpc.watch.find import look_for_runs
from ddp_hpc.watch.queue import asker
from ddp_hpc.watch.status import RunStatus, read_status

HEADER = ("RUN", "STATE", "STEP", "LOSS", "EVALUATION", "CHECKPOINT", "ATTEMPT", "AGE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_runs_dir(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON list of what `status --json` prints")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print the table."""
    runs_dir = chosen_runs_dir(args.runs_dir, environment)
    ask = asker(environment, clock=time.time)
    runs, num_unreadable = look_for_runs(runs_dir)
    statuses = []
    for each in runs:
        try:
            statuses.append(read_status(each, now=time.time(), ask=ask))
        except (OSError, UnreadableError):
            num_unreadable += 1
    if num_unreadable:
        print(f"note: {num_unreadable} in {str(runs_dir)!r} cannot be read, so left out", file=sys.stderr)
    if args.json:
        print(as_json([asdict(status) for status in statuses]))
    elif statuses:
        print(table(HEADER, map(_row, statuses)))
    else:
        print(f"There are no runs in {str(runs_dir)!r}.")
    return 0


def _row(status: RunStatus) -> tuple[str, ...]:
    return (
        status.run,
        status.state,
        steps(status),
        number(status.loss),
        or_dash(numbers(status.metrics)),
        or_dash(status.last_checkpoint),
        or_dash(status.attempt),
        duration(status.age_s),
    )
