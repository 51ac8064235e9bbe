"""Start the points of a sweep that are not submitted yet, or those that have failed.

ddp-hpc submit CONFIG --sweep KEY=VALUES makes a sweep; ddp-hpc list NAME lists its points.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from ddp_hpc.cli.runs import add_runs_dir, chosen_runs_dir
from ddp_hpc.cli.sweeps import add_limits, report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", choices=("continue",), help="start the points that no job has")
    parser.add_argument("sweep", metavar="NAME", help="a sweep's name, or its directory")
    parser.add_argument("--failed", action="store_true", help="start the points that have failed again, and no others")
    add_limits(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_runs_dir(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Start the points."""
    from ddp_hpc.sweep.start import continue_sweep  # late: `--help` needs none of it
    from ddp_hpc.sweep.sweep_dir import find_sweep

    sweep_dir = find_sweep(args.sweep, chosen_runs_dir(args.runs_dir, environment))
    asked = {"at_most": args.at_most, "stop_after_failures": args.stop_after_failures}
    limits = {key: value for key, value in asked.items() if value is not None}
    started = continue_sweep(sweep_dir, environment, is_failed=args.failed, limits=limits)
    return report(started, is_json=args.json)
