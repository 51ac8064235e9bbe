"""Compute some steps of a run again on this machine, and compare them with what the run recorded.

This runs the recipe's own code in the run's working directory: files that it writes itself are written again. DDP_HPC_REPLAY=1 in its environment says so.
The exit code is 0 if all is the same, 1 if something differs, and 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import CheckpointError, NotReplayedError, UnreadableError
from ddp_hpc.base.exit_codes import FAILED, FINISHED, REFUSED
from ddp_hpc.base.processes import signals_as_ctrl_c
from ddp_hpc.cli.formatting import as_json, spell_nonfinite_floats
from ddp_hpc.cli.runs import add_flag, add_run_argument, chosen_own_run, nonnegative_float, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "--from",
        type=int,
        dest="start",
        metavar="A",
        help="compute the steps after A; default: the newest checkpoint before B",
    )
    parser.add_argument(
        "--to", type=int, dest="end", metavar="B", help="up to step B; default: the newest step on record"
    )
    parser.add_argument(
        "--world",
        type=positive_int,
        metavar="N",
        help="use N ranks; default: as many as the run had. With another number, only losses are compared, with a tolerance",
    )
    add_flag(
        parser,
        "--trace",
        "write a hash of each tensor of each step, in the order of computation, and keep the replay's directory",
    )
    parser.add_argument(
        "--tolerance",
        type=nonnegative_float,
        default=1e-3,
        metavar="T",
        help="with another world or device: accept losses that differ by up to this share of their size (default: 0.001)",
    )
    add_code_option(parser)
    add_flag(parser, "--json", "print JSON instead of text")


def add_code_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--code",
        type=Path,
        metavar="DIR",
        help="import your code from DIR; default: the run's snapshot, or where it was when the run started",
    )


def print_progress(text: str) -> None:
    """Print what is done, beside the result."""
    print(text, file=sys.stderr, flush=True)


def print_report(report: Any, text: str, *, is_json: bool) -> None:
    """Print a result as text, or its fields as JSON; of a replay's differences, only the first."""
    shown = {key: value for key, value in asdict(report).items() if key != "differences"}
    print(as_json(spell_nonfinite_floats(shown)) if is_json else text)


@contextmanager
def raise_not_replayed() -> Iterator[None]:
    """Raise NotReplayedError for what keeps the steps from being computed or compared: such an error does not say that they differ."""
    try:
        yield
    except (CheckpointError, UnreadableError, OSError) as error:
        raise NotReplayedError(f"The steps could not be compared: {error}") from error


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Replay, and print the result; the exit code is 0 where all is the same."""
    from ddp_hpc.cli.replay_text import replay_text
    from ddp_hpc.prove.replay.history import read_history
    from ddp_hpc.prove.replay.private_run import WantedSteps
    from ddp_hpc.prove.replay.replaying import replay
    from ddp_hpc.run.run_dir.replays import ReplayRequest

    with raise_not_replayed():
        history = read_history(chosen_own_run(args, environment))
    end = history.last_step if args.end is None else args.end
    newest = max((step for step in history.committed if step < end), default=0)
    start = newest if args.start is None else args.start
    request = ReplayRequest(end_step=end, trace_from=start + 1 if args.trace else None)
    wanted = WantedSteps(history=history, start=start, request=request, world_size=args.world, code=args.code)
    with signals_as_ctrl_c(), raise_not_replayed():
        report = replay(wanted, environment, tolerance=args.tolerance, say=print_progress)
    print_report(report, replay_text(report), is_json=args.json)
    return {"the same": FINISHED, "different": FAILED, "not compared": REFUSED}[report.verdict]
