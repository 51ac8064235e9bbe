"""One worker in a process that srun or torchrun has started; agents fork theirs.

    python -m ddp_hpc.job.task RUN_DIR --worker ddp_hpc.train.worker --attempt 0 --meet "ADDRESS PORT"

With `--meet`, srun has started it, one task a worker, and its rank is Slurm's; without, torchrun has, and says so in
the environment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from ddp_hpc import exit_codes, processes
from ddp_hpc.errors import ConfigError
from ddp_hpc.job.deaths import report
from ddp_hpc.job.meeting import Meeting, PortTakenError, listen, network_defaults
from ddp_hpc.job.surroundings import imports_for_good, leave_at_once, make_users_code_importable, torch_defaults
from ddp_hpc.records import write_verdict
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.allocation import StepPlace, step_place


def main(argv: Sequence[str] | None = None) -> int:
    """Run the worker; return what whoever started it takes for success or failure."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.task", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--meet", type=Meeting.parse, metavar="'ADDRESS PORT'")
    arguments = parser.parse_args(argv)
    processes.block_awaited_signals()  # until the worker listens: one that comes while it imports is not lost
    run, meeting = RunDir(arguments.run), arguments.meet
    make_users_code_importable(os.environ)
    if meeting is not None:
        place = step_place(os.environ)
        surroundings = {**torch_defaults(_num_threads(place)), **network_defaults(meeting.address)}
        os.environ.update({**surroundings, **os.environ, **rank_environ(place, meeting)})
    else:
        processes.die_with_parent(os.getppid())  # torchrun, which would leave its workers behind when killed
        os.environ["NODE_RANK"] = os.environ["GROUP_RANK"]  # as torchrun calls it
    code = _work(run, arguments.worker, arguments.attempt, meeting)
    if os.environ["RANK"] == "0":
        write_verdict(run, arguments.attempt, code)
    return exit_codes.FINISHED if code == exit_codes.STOPPED else code


def _num_threads(place: StepPlace) -> int:
    """Return the CPUs of this task: Slurm may bind it to them, or let all tasks of a node roam."""
    num_bound = len(os.sched_getaffinity(0))
    return min(num_bound, place.cpus_per_task or num_bound)


def rank_environ(place: StepPlace, meeting: Meeting) -> Mapping[str, str]:
    """Return the variables that every PyTorch launcher sets."""
    return {
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "NODE_RANK": str(place.node_rank),
        "MASTER_ADDR": meeting.address,
        "MASTER_PORT": str(meeting.port),
    }


def _work(run: RunDir, worker_module: str, attempt: int, meeting: Meeting | None) -> int:
    rank = int(os.environ["RANK"])
    try:
        with ExitStack() as resources:
            listen_fd = None
            if meeting is not None and rank == 0:
                listen_fd = os.dup(resources.enter_context(listen(meeting)).fileno())
            with imports_for_good():
                worker = importlib.import_module(worker_module)
                worker.preload(str(run.path))
        code: int = worker.main(str(run.path), os.environ, attempt=attempt, listen_fd=listen_fd)
    except PortTakenError:
        return exit_codes.PORT_TAKEN
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
        report(run.rank_error(attempt, rank), error, rank=rank, log=run.console)
        return exit_codes.REFUSED if isinstance(error, ConfigError) else exit_codes.FAILED
    return code


if __name__ == "__main__":
    try:
        result = main()
    except BaseException:  # noqa: BLE001  the way out is the same for all
        traceback.print_exc()
        result = exit_codes.FAILED
    sys.stdout.flush()
    leave_at_once(result)
