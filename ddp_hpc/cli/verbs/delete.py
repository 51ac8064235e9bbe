"""Delete a run that is not running: its checkpoints, metrics and logs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping

from ddp_hpc.cli.runs import add_run, chosen_run
from ddp_hpc.errors import ConfigError
from ddp_hpc.watch.status import read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("--yes", action="store_true", help="delete without asking for confirmation")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Ask, and delete the run."""
    from ddp_hpc.submission import removal

    run_dir = chosen_run(args, environment)
    if not args.yes:
        status = read_status(run_dir, now=time.time())
        saved = (
            "no checkpoint" if status.last_checkpoint is None else f"checkpoints up to step {status.last_checkpoint}"
        )
        if not _agrees(f"Delete {run_dir.path} ({status.state}, {saved})? [y/N] "):
            print("Nothing was deleted.")
            return 1
    removal.delete(run_dir, environment)
    print(f"{run_dir.name} was deleted.")
    return 0


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "`ddp-hpc delete` asks for confirmation, but its input is not a terminal. Add `--yes` to delete without a question."
        )
    try:
        return input(question).strip().lower() in {"y", "yes"}
    except EOFError:
        return False
