"""One worker in a new process, which an agent starts where it must not fork; it imports everything itself.

    python -m ddp_hpc.job.node.spawned RUN_DIR --worker ddp_hpc.train.worker --attempt 0 --agent 4711 --cpus 0,1 --listen-fd 5

The agent sets its rank in the environment.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc import exit_codes
from ddp_hpc.base import processes
from ddp_hpc.errors import exit_code_of
from ddp_hpc.job.node.python_environ import imports_for_good, leave_at_once, make_users_code_importable
from ddp_hpc.job.node.under_nsys import MARK, Worker, run_under, settle
from ddp_hpc.nsys import CONTROL, Profiler
from ddp_hpc.run_dir.failure_reports import report
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.workload.protocol import load_worker


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.spawned", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    started_by = parser.add_mutually_exclusive_group(required=True)
    started_by.add_argument("--agent", type=int, help="its process id")
    started_by.add_argument("--under-nsys", metavar="FDS", help="nsys has started it: see `under_nsys.settle`")
    parser.add_argument("--cpus")
    parser.add_argument("--nsys", type=Profiler.parse)
    parser.add_argument("--listen-fd", type=int)
    arguments = parser.parse_args(argv)
    if arguments.under_nsys:
        os.environ[CONTROL] = str(settle(arguments.under_nsys))
        os.environ.pop(MARK, None)  # what the user's code starts is not of nsys
    else:
        processes.die_with_parent(arguments.agent)
    # Until the worker has installed its handlers: what comes earlier stays pending.
    processes.block_awaited_signals()
    processes.block_interruptions()
    if arguments.cpus:
        os.sched_setaffinity(0, [int(number) for number in arguments.cpus.split(",")])
    run, rank = RunDir(arguments.run), int(os.environ["RANK"])
    itself = Worker(
        run=run,
        module=arguments.worker,
        attempt=arguments.attempt,
        rank=rank,
        environ={**os.environ},
        listen_fd=arguments.listen_fd,
    )
    code = run_under(arguments.nsys, itself, os.environ)
    if code is not None:
        return code
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
