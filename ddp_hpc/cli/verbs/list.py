"""List the runs, the newest last.

ddp-hpc list --filter state=finished --filter train.epochs=20 --sort accuracy --keys
ddp-hpc list SWEEP --sort accuracy
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_hpc.base.discretion import value_or_hidden
from ddp_hpc.base.errors import ConfigError, UnreadableError
from ddp_hpc.base.leftovers import remove_leftovers
from ddp_hpc.cli.formatting import as_json, duration, named_numbers, number, or_dash, table
from ddp_hpc.cli.runs import add_flag, add_runs_dir_option, chosen_runs_dir, slurm_asker
from ddp_hpc.cli.status_text import last_save_text, steps_text
from ddp_hpc.watch.find import scan_runs
from ddp_hpc.watch.status import RunStatus, read_status

HEADER = ("RUN", "STATE", "STEP", "LOSS", "EVALUATION", "CHECKPOINT", "ATTEMPT", "AGE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", help="list the points of this sweep, with what each sets")
    add_runs_dir_option(parser)
    add_flag(parser, "--failed", "of a sweep: list only the points that have failed")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="list only runs whose key has this value; `state=STATE` filters by state",
    )
    parser.add_argument("--sort", metavar="WHAT", help="sort by a column, an evaluation metric or a key; default: age")
    add_flag(parser, "--reverse", "reverse the order")
    add_flag(parser, "--keys", "add a column for each key whose value differs between the runs")
    add_flag(parser, "--json", "print a JSON list, with what `status --json` prints for each run")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    runs_dir = chosen_runs_dir(args.runs_dir, environment)
    if args.sweep is not None:
        from ddp_hpc.cli.sweep_table import print_sweep  # late: a list of runs needs none of it

        return print_sweep(args, runs_dir, environment)
    if args.failed:
        raise ConfigError("`--failed` is for the points of a sweep. Name the sweep, or use `--filter state=failed`.")
    return _print_runs(args, runs_dir, environment)


def _print_runs(args: argparse.Namespace, runs_dir: Path, environment: Mapping[str, str]) -> int:
    remove_leftovers(runs_dir)
    ask = slurm_asker(environment)
    runs, num_unreadable = scan_runs(runs_dir)
    statuses = []
    for each in runs:
        try:
            statuses.append(read_status(each, now=time.time(), ask=ask))
        except (OSError, UnreadableError):
            num_unreadable += 1
    sweeps = [] if args.json else sorted(path.parent.name for path in runs_dir.glob("*/sweep.jsonl"))
    if sweeps:
        print(f"sweeps there, each with a list of its own (`ddp-hpc list NAME`): {', '.join(sweeps)}", file=sys.stderr)
    if num_unreadable:
        print(
            f"note: the list leaves out {num_unreadable} of the directories in {str(runs_dir)!r}, which cannot be read. "
            "Check their permissions; if the file system does not answer, try again later.",
            file=sys.stderr,
        )
    differing: list[dict[str, Any]] = []
    if args.filter or args.sort or args.keys or args.reverse:
        statuses, differing = _selected(statuses, args)
    if args.json:
        records = [asdict(status) for status in statuses]
        for number, record in enumerate(records):
            record.update({"differs": differing[number]} if args.keys else {})
        print(as_json(records))
    elif statuses:
        names = list(differing[0]) if args.keys else []
        rows = [
            (*_row(status), *(or_dash(differing[number][name]) for name in names))
            for number, status in enumerate(statuses)
        ]
        print(table((*HEADER, *names), rows))
        _print_reasons(statuses)
    else:
        such = f" with {' and '.join(args.filter)}" if args.filter else " outside of sweeps" if sweeps else ""
        print(f"There are no runs{such} in {str(runs_dir)!r}. List another directory with `--runs-dir DIR`.")
    return 0


def _print_reasons(statuses: Sequence[RunStatus]) -> None:
    """Name what the table does not show: why a job never started, and the sample or file because of which a run has failed."""
    for status in statuses:
        if status.state == "cancelled" and status.attempt is None and status.reason:
            print(f"{status.run}: {status.reason}", file=sys.stderr)
        elif status.state == "failed" and status.entity:
            print(f"{status.run}: {status.why_last or f'`{status.entity}` failed'}", file=sys.stderr)


def _selected(statuses: Sequence[RunStatus], args: argparse.Namespace) -> tuple[list[RunStatus], list[dict[str, Any]]]:
    """Return the runs that match the filters, sorted as the user asks, each with its values of the keys that differ."""
    from ddp_hpc.watch.compare_runs import differing_keys, filter_runs, sort_runs, values_of  # late: only to compare

    runs = filter_runs(statuses, args.filter)
    if args.sort:
        runs = sort_runs(runs, args.sort, is_reversed=args.reverse)
    elif args.reverse:
        runs.reverse()
    names = differing_keys([values_of(run.path) for run in runs]) if args.keys else []
    return runs, [{name: value_or_hidden(name, values_of(run.path).get(name)) for name in names} for run in runs]


def _row(status: RunStatus) -> tuple[str, ...]:
    return (
        status.run,
        status.state,
        steps_text(status),
        number(status.loss),
        or_dash(named_numbers(status.metrics)),
        or_dash(last_save_text(status) if status.last_checkpoint is None else status.last_checkpoint),
        or_dash(status.attempt),
        duration(status.age_s),
    )
