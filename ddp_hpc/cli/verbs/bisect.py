"""Find the first step and the first tensor in which two runs differ, and what differed before it.

This runs the recipes' own code in the runs' working directories: files that it writes itself are written again. DDP_HPC_REPLAY=1 in its environment says so.
The exit code is 0 if the runs are the same, 1 if they differ, and 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.base.exit_codes import FAILED, FINISHED
from ddp_hpc.base.processes import signals_as_ctrl_c
from ddp_hpc.cli.runs import add_flag, add_runs_dir_option, chosen_own_run
from ddp_hpc.cli.verbs.replay import print_progress, print_report, raise_not_replayed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="RUN1", help="a run's name, its directory, or its Slurm job id")
    parser.add_argument("other", metavar="RUN2", help="the other run, which the first is compared with")
    add_runs_dir_option(parser)
    for name, which in (("--code1", "first"), ("--code2", "second")):
        parser.add_argument(
            name,
            type=Path,
            metavar="DIR",
            help=f"import the {which} run's code from DIR; default: its snapshot, or where it was when the run started",
        )
    add_flag(parser, "--json", "print JSON instead of text")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Bisect, and print the result; the exit code is 0 where the runs are the same."""
    from ddp_hpc.cli.replay_text import bisect_text
    from ddp_hpc.prove.replay.bisecting import bisect
    from ddp_hpc.prove.replay.history import read_history

    with raise_not_replayed():
        one, other = [read_history(chosen_own_run(args, environment, name)) for name in (args.one, args.other)]
    with signals_as_ctrl_c(), raise_not_replayed():
        report = bisect((one, other), environment, codes=(args.code1, args.code2), say=print_progress)
    print_report(report, bisect_text(report), is_json=args.json)
    return FINISHED if report.verdict == "the same" else FAILED
