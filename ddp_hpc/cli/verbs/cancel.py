"""Kill a run at once, without a new checkpoint. Its checkpoints stay; `ddp-hpc submit` resumes it from the newest."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ddp_hpc.cli.runs import add_run, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """End the run."""
    from ddp_hpc.submission.backend import backend_of  # late: `--help` needs no back end

    run_dir = chosen_run(args, environment)
    print(backend_of(run_dir).cancel(run_dir, environment))
    return 0
