"""Ask a run to write a checkpoint and stop; `ddp-hpc submit` with the same configuration resumes it from there."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ddp_hpc.cli.runs import add_run_argument, chosen_own_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.launch.submission.backend import backend_of  # late: `--help` needs no back end

    run_dir = chosen_own_run(args, environment)
    print(backend_of(run_dir).stop(run_dir, environment))
    return 0
