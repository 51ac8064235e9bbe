"""Have a run commit a checkpoint and leave; submit it again to go on from there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ddp_hpc.cli.runs import add_run, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Ask the run to stop."""
    from ddp_hpc.submission import local_executor

    print(local_executor.stop(chosen_run(args, environment)))
    return 0
