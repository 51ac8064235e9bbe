"""Compute random segments of a run again, and say whether they give what the run recorded.

This runs the recipe's own code in the run's working directory: files that it writes itself are written again. DDP_HPC_REPLAY=1 in its environment says so.
The exit code is 0 for PASS, 1 for FAIL, and 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping

from ddp_hpc.base.exit_codes import FAILED, FINISHED, REFUSED
from ddp_hpc.base.processes import signals_as_ctrl_c
from ddp_hpc.cli.runs import add_flag, add_run_argument, chosen_own_run, positive_int
from ddp_hpc.cli.verbs.replay import add_code_option, print_progress, print_report, raise_not_replayed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "--segments",
        type=positive_int,
        default=3,
        metavar="N",
        help="compute N segments again, each from one checkpoint to the next (default: 3)",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="choose the segments by this seed; default: a new one")
    add_code_option(parser)
    add_flag(parser, "--json", "print JSON instead of text")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Audit, and print the result; the exit code is 0 where all segments are the same."""
    from ddp_hpc.cli.replay_text import audit_text
    from ddp_hpc.prove.replay.auditing import audit
    from ddp_hpc.prove.replay.history import read_history

    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    with raise_not_replayed():
        history = read_history(chosen_own_run(args, environment))
    with signals_as_ctrl_c(), raise_not_replayed():
        report = audit(history, environment, number=args.segments, seed=seed, code=args.code, say=print_progress)
    print_report(report, audit_text(report), is_json=args.json)
    return {"PASS": FINISHED, "FAIL": FAILED, "UNKNOWN": REFUSED}[report.verdict]
