"""One worker in a new process, which an agent starts where it must not fork; it imports everything itself.

    python -m ddp_hpc.job.node.spawned RUN_DIR --worker ddp_hpc.train.worker --attempt 0 --agent 4711 --cpus 0,1 --listen-fd 5

The agent sets its rank in the environment.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import exit_code_of
from ddp_hpc.job.node.cpus import keep_to
from ddp_hpc.job.node.python_environ import imports_for_good, leave_at_once, make_users_code_importable
from ddp_hpc.job.node.under_nsys import parse_ranks, start_under_nsys
from ddp_hpc.run.run_dir.failure_reports import report
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.workload.protocol import load_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.spawned", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True, help="its process id")
    parser.add_argument("--cpus")
    parser.add_argument("--nsys", type=parse_ranks, default=frozenset())
    parser.add_argument("--under-nsys", type=int, metavar="PID", help="nsys has started it, which has this process id")
    parser.add_argument("--listen-fd", type=int)
    argv = sys.argv[1:] if argv is None else argv
    arguments = parser.parse_args(argv)
    run, rank = RunDir(arguments.run), int(os.environ["RANK"])
    if arguments.under_nsys is None:
        processes.die_with_parent(arguments.agent)  # across exec, too
    else:
        processes.die_after(arguments.under_nsys)
    # Until the worker has installed its handlers: what comes earlier stays pending.
    processes.block_awaited_signals()
    processes.block_interruptions()
    if rank in arguments.nsys and arguments.under_nsys is None:
        start_under_nsys("ddp_hpc.job.node.spawned", argv, run=run, attempt=arguments.attempt, rank=rank)
    if arguments.cpus:
        keep_to(map(int, arguments.cpus.split(",")), os.environ)
    make_users_code_importable(os.environ)
    try:
        with imports_for_good():
            worker = load_worker(arguments.worker)
            worker.preload(str(run.path))
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
        report(run.rank_error(arguments.attempt, rank), error, rank=rank, log=run.console)
        return exit_code_of(error)
    return worker.main(str(run.path), os.environ, attempt=arguments.attempt, listen_fd=arguments.listen_fd)


if __name__ == "__main__":
    try:
        result = main()
    except BaseException:  # noqa: BLE001  the way out is the same for all
        traceback.print_exc()
        result = exit_codes.FAILED
    leave_at_once(result)
