"""Kill a run at once, without a new checkpoint. Its checkpoints stay; `ddp-hpc submit` resumes it from the newest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from ddp_hpc.base.errors import DdpHpcError
from ddp_hpc.base.exit_codes import FAILED
from ddp_hpc.cli.runs import add_runs_dir_option, chosen_own_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="+",
        help="a run's name, its directory, or its Slurm job id; several end in this order",
    )
    add_runs_dir_option(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """End the runs; where one cannot be ended, say so and go on with the others."""
    from ddp_hpc.launch.submission.backend import backend_of  # late: `--help` needs no back end

    *before, last = [chosen_own_run(args, environment, name) for name in args.run]
    code = 0
    for run_dir in before:
        try:
            print(backend_of(run_dir).cancel(run_dir, environment), flush=True)
        except DdpHpcError as error:  # of a few runs, some may have ended
            print(f"error: {error}", file=sys.stderr)
            code = error.exit_code
        except OSError as error:  # the file system does not answer for this one
            print(f"error: {run_dir.name} was not cancelled: {error}", file=sys.stderr)
            code = FAILED
    print(backend_of(last).cancel(last, environment))
    return code
