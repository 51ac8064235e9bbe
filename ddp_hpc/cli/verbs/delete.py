"""Delete a run that is not running: its checkpoints, metrics and logs. Or delete a sweep with all of its runs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.runs import add_flag, add_run_argument, chosen_own_run, chosen_runs_dir
from ddp_hpc.run.run_dir.write_permissions import refuse_strangers_dir
from ddp_hpc.watch.status import read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    add_flag(parser, "--yes", "delete without asking for confirmation")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.launch.sweep.sweep_dir import sweep_named  # late: `--help` needs none of it

    sweep_dir = sweep_named(args.run, chosen_runs_dir(args.runs_dir, environment))
    if sweep_dir is not None:
        from ddp_hpc.launch.sweep.manage_sweep import (  # late: most of what is deleted are runs
            delete_sweep,
            describe_sweep,
        )

        refuse_strangers_dir(sweep_dir.path)
        what = describe_sweep(sweep_dir)
        if not (args.yes or _has_agreed(f"Delete {sweep_dir.path} ({what})? [y/N] ")):
            return 1
        delete_sweep(sweep_dir, environment)
        print(f"{sweep_dir.name} was deleted: {what}.")
        return 0
    from ddp_hpc.launch.submission.removal import delete_run

    run_dir = chosen_own_run(args, environment)
    if not args.yes:
        status = read_status(run_dir, now=time.time())
        step = status.last_checkpoint
        saved = "no checkpoint" if step is None else f"checkpoints up to step {step}"
        if not _has_agreed(f"Delete {run_dir.path} ({status.state}, {saved})? [y/N] "):
            return 1
    delete_run(run_dir, environment)
    print(f"{run_dir.name} was deleted.")
    return 0


def _has_agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "`ddp-hpc delete` asks for confirmation, but its input is not a terminal. Add `--yes` to delete without a question."
        )
    with suppress(EOFError):
        if input(question).strip().lower() in {"y", "yes"}:
            return True
    print("Nothing was deleted.")
    return False
