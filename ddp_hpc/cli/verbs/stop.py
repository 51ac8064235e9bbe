"""Have a run commit a checkpoint and leave; submit it again to go on from there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ddp_hpc.cli.runs import add_run, chosen_run, is_slurms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Ask the run to stop."""
    from ddp_hpc.submission import local

    run_dir = chosen_run(args, environment)
    if is_slurms(run_dir):
        from ddp_hpc.submission import slurm

        print(slurm.stop(run_dir))
    else:
        print(local.stop(run_dir))
    return 0
