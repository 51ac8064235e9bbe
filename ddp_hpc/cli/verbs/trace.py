"""Write a trace of a run for ui.perfetto.dev or chrome://tracing: a row for each rank, with attempts, evaluations, saves, failures and hangs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.formatting import finite
from ddp_hpc.cli.output_file import write_output
from ddp_hpc.cli.runs import add_run, chosen_run
from ddp_hpc.watch.report.reading import read_run
from ddp_hpc.watch.report.trace import trace_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser, optional=True)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write, `-` for standard output; default: NAME-trace.json in this directory",
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Write the trace, and print its path."""
    chosen = chosen_run(args, environment)
    found = read_run(chosen, now=time.time(), environ=environment)
    if not found.times:
        raise ConfigError(f"Run {chosen.name!r} has not begun an attempt, so there is nothing to trace yet.")
    text = json.dumps(finite(trace_of(found)), allow_nan=False)
    write_output(args.output or Path(f"{chosen.name}-trace.json"), text)
    for profile in chosen.profile_traces():
        print(f"note: what PyTorch's profiler recorded is in a file of its own: {profile}", file=sys.stderr)
    for report in chosen.nsys_reports():
        print(f"note: what Nsight Systems recorded is in a file of its own: {report}", file=sys.stderr)
    return 0
