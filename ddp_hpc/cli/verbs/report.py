"""Write a page that shows a run: its attempts, loss, phases, slow ranks, checkpoints, cost, and what to set.

ddp-hpc report digits -o report.html
ddp-hpc report digits --against digits-2
ddp-hpc report SWEEP
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.base.durable import atomic_output
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.runs import add_run_argument, chosen_run, chosen_runs_dir
from ddp_hpc.launch.sweep.sweep_dir import read_sweep, sweep_named
from ddp_hpc.watch.find import find_run
from ddp_hpc.watch.report.page import page_of
from ddp_hpc.watch.report.reading import read_run
from ddp_hpc.watch.report.sweep import sweep_page

_STDOUT = Path("-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_run_argument(parser, optional=True)
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write it, `-` for standard output; default: NAME-report.html, here",
    )
    parser.add_argument("--against", metavar="RUN2", help="show this other run beside it, and what differs")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    now = time.time()
    runs_dir = chosen_runs_dir(args.runs_dir, environment)
    sweep_dir = sweep_named(args.run, runs_dir) if args.run else None
    if sweep_dir is not None:
        if args.against:
            raise ConfigError("`--against` compares two runs, and this is a sweep. Name a point of it as SWEEP/POINT.")
        points = [(sweep_dir.run(point), point.shown_settings) for point in read_sweep(sweep_dir).points]
        name, text = sweep_dir.name, sweep_page(sweep_dir.name, points, now=now, environ=environment)
    else:
        chosen = chosen_run(args, environment)
        other = find_run(args.against, runs_dir) if args.against else None
        against = None if other is None else read_run(other, now=now, environ=environment)
        name, text = chosen.name, page_of(read_run(chosen, now=now, environ=environment), now=now, against=against)
    output = args.output or Path(f"{name}-report.html")
    if output != _STDOUT:
        with atomic_output(output) as path:
            path.write_text(text, encoding="utf-8")
        print(output)
    elif sys.stdout.isatty():
        print(text)
    else:  # what reads it goes by the encoding that the text itself names
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
    return 0
