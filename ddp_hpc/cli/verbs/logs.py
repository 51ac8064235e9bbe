"""Print a run's log: the log of the job, or with `--rank` or `--all` the logs of the workers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping

from ddp_hpc.base.patience import await_answer
from ddp_hpc.cli.runs import add_run_argument, chosen_run, slurm_asker
from ddp_hpc.launch.submission.release_hold import require_startable
from ddp_hpc.run.run_dir.poll_files import ReadCache, await_next_poll, newest_attempt
from ddp_hpc.watch.logs import LogSelection, follow_lines, read_lines, require_log
from ddp_hpc.watch.status import read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run ends")
    parser.add_argument(
        "--attempt",
        type=int,
        metavar="K",
        help="print the log of start number K of the workers (rank zero's log, unless --rank or --all is given)",
    )
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--rank", type=int, metavar="N", help="print the log of rank N")
    whose.add_argument("--all", action="store_true", help="print the logs of all ranks, with the rank before each line")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    run_dir = chosen_run(args, environment)
    ask = slurm_asker(environment)
    files = ReadCache()
    choice = LogSelection(rank=args.rank, all_ranks=args.all, attempt=args.attempt)

    def is_over() -> bool:
        status = await_answer(str(run_dir.path), lambda: read_status(run_dir, now=time.time(), ask=ask, files=files))
        if status.state == "waiting":
            require_startable(run_dir, status.job_id, status.reason)
        if not status.is_alive:
            await_answer(str(run_dir.path), lambda: require_log(run_dir, choice))
        return not status.is_alive

    is_drawn = sys.stdout.isatty()  # what goes to a file or a pipe keeps every byte
    lines = (
        follow_lines(
            run_dir,
            choice,
            is_over=is_over,
            pause=lambda: await_next_poll(await_answer(str(run_dir.attempts), lambda: newest_attempt(run_dir, files))),
            only_final_text=is_drawn,
        )
        if args.follow
        else read_lines(run_dir, choice, only_final_text=is_drawn)
    )
    for line in lines:
        print(line, flush=args.follow)
    return 0
