"""Start the points of a sweep that are not submitted yet, or those that have failed; follow a sweep to its end; or cancel it.

Without Slurm, `continue` runs the points itself and returns when they have ended.

ddp-hpc submit CONFIG --sweep KEY=VALUES makes a sweep; ddp-hpc list NAME lists its points.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.runs import add_flag, add_runs_dir_option, chosen_runs_dir, typed_name
from ddp_hpc.cli.sweeps import add_limit_options, print_jobs
from ddp_hpc.run.run_dir.write_permissions import refuse_strangers_dir


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("continue", "follow", "cancel"),
        help="continue: start the points that have not finished and that no job has; follow: print what becomes of each point until none waits or runs; "
        "cancel: cancel all that wait or run",
    )
    parser.add_argument("sweep", metavar="NAME", help="a sweep's name, or its directory")
    add_flag(parser, "--failed", "start the points that have failed again, and no others")
    add_limit_options(parser)
    add_flag(parser, "--json", "print JSON instead of text")
    add_runs_dir_option(parser)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.launch.sweep.manage_sweep import cancel_sweep, continue_sweep  # late: `--help` needs none of it
    from ddp_hpc.launch.sweep.sweep_dir import find_sweep

    sweep_dir = find_sweep(args.sweep, chosen_runs_dir(args.runs_dir, environment))
    asked = {"at_most": args.at_most, "stop_after_failures": args.stop_after_failures}
    limits = {key: value for key, value in asked.items() if value is not None}
    here: Sequence[int] = ()
    if args.what == "follow":
        if args.failed or limits:
            raise ConfigError(
                "`sweep follow` takes none of `--failed`, `--at-most` and `--stop-after-failures`. Give them to `ddp-hpc sweep continue`, "
                "and follow the sweep then."
            )
    else:
        refuse_strangers_dir(sweep_dir.path)
        if args.what == "cancel":
            num_live = cancel_sweep(sweep_dir, environment)
            print(
                f"{sweep_dir.name}: no other point starts, and {num_live} that waited again or ran were cancelled. Their checkpoints stay; to start "
                f"all points again that have neither finished nor failed: ddp-hpc sweep continue {typed_name(sweep_dir, environment)}"
            )
            return 0
        started = continue_sweep(sweep_dir, environment, is_failed=args.failed, limits=limits)
        code = print_jobs(started, environment, is_json=args.json)
        if not started.runs_here:
            return code
        here = started.numbers
    from ddp_hpc.cli.sweep_follow import follow_sweep

    return follow_sweep(sweep_dir, environment, word=args.sweep, here=here, is_json=args.json)
