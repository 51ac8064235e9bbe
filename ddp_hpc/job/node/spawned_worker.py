"""One worker in a new process, which an agent starts where it must not fork; it imports everything itself.

    python -m ddp_hpc.job.node.spawned_worker RUN_DIR --worker ddp_hpc.train.worker --attempt 0 --agent 4711 --cpus 0,1 --listen-fd 5

The agent sets its rank in the environment.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.job.node.cpus import restrict_to_cpus
from ddp_hpc.job.node.python_environ import make_users_code_importable, run_and_exit, run_worker
from ddp_hpc.run.run_dir.paths import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return its exit code."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.spawned_worker", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--agent", type=int, required=True, help="its process id")
    parser.add_argument("--cpus")
    parser.add_argument("--listen-fd", type=int)
    arguments = parser.parse_args(argv)
    processes.die_with_parent(arguments.agent)
    # Until the worker has installed its handlers: what comes earlier stays pending.
    processes.block_awaited_signals()
    processes.block_interruptions()
    if arguments.cpus:
        restrict_to_cpus(map(int, arguments.cpus.split(",")), os.environ)
    make_users_code_importable(os.environ)
    attempt, listen_fd = arguments.attempt, arguments.listen_fd
    return run_worker(RunDir(arguments.run), arguments.worker, os.environ, attempt=attempt, listen_fd=listen_fd)


if __name__ == "__main__":
    run_and_exit(main)
