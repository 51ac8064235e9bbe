"""Show a run's state, step, loss, time left and newest checkpoint."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict

from ddp_hpc.cli.formatting import as_json
from ddp_hpc.cli.goodput_text import as_line, as_record, goodput_of_run
from ddp_hpc.cli.runs import add_run, chosen_run, slurm_asker, word_for
from ddp_hpc.cli.status_text import as_text
from ddp_hpc.watch.status import read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser, optional=True)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Print the status."""
    now = time.time()
    run_dir = chosen_run(args, environment)
    status = read_status(run_dir, now=now, ask=slurm_asker(environment))
    goodput = goodput_of_run(run_dir, status, now=now)
    if args.json:
        print(as_json({**asdict(status), "goodput": as_record(goodput)}))
        return 0
    print(as_text(status, now=now, word=word_for(run_dir, environment), node_time=as_line(goodput)))
    return 0
