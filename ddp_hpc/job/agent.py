"""The node agent: imports what all workers need once, forks one worker a GPU, and sees that they die together.

    python -m ddp_hpc.job.agent RUN_DIR --worker ddp_hpc.train.worker --attempt 0 --num-workers 4

Alone, it is a world of its own. With `--meet "ADDRESS PORT"`, srun has started one on each node of a job: the node's
number comes from Slurm, rank zero's agent listens there, and it alone says how it went (`records.write_verdict`).

The worker is a module named on the command line, so that this one stays free of torch. It offers `preload(run)`, called
before the fork, and `main(run, environ, attempt=, listen_fd=)`, which returns the worker's exit code.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from ddp_hpc import exit_codes, processes
from ddp_hpc.errors import ConfigError
from ddp_hpc.job.deaths import report, report_killed
from ddp_hpc.job.meeting import LOOPBACK, Meeting, PortTakenError, listen, network_defaults
from ddp_hpc.job.surroundings import import_by_pythonpath_alone, leave_at_once, torch_defaults
from ddp_hpc.records import write_verdict
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.allocation import step_place

GRACE_S = 1.0
"""How long workers may still write down why they fail, once the first is dead."""
ALONE = Meeting(LOOPBACK, 0)
"""Where the ranks meet that have this machine to themselves: a port that the kernel chooses."""


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The workers of this node, and where the group meets."""

    run: RunDir
    attempt: int
    num_workers: int
    """On this node."""
    cpus_per_worker: int | None
    meeting: Meeting = ALONE
    node_rank: int = 0
    num_nodes: int = 1

    @property
    def is_in_step(self) -> bool:
        """Whether srun has started it, with others."""
        return self.meeting != ALONE

    @property
    def cpu_sets(self) -> list[tuple[int, ...]]:
        return processes.share_cpus(sorted(os.sched_getaffinity(0)), self.num_workers, self.cpus_per_worker)

    @property
    def num_threads(self) -> int:
        cpus = sorted(os.sched_getaffinity(0))
        return processes.threads_per_worker(cpus, self.num_workers, self.cpus_per_worker)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers and see them through; return what their exit codes mean together."""
    arguments = _parse(argv)
    processes.die_with_parent(os.getppid())
    processes.block_awaited_signals()
    import_by_pythonpath_alone()
    crew = _crew(arguments)
    code = _work(crew, arguments.worker)
    if not crew.is_in_step:
        return code
    if crew.node_rank == 0:
        write_verdict(crew.run, crew.attempt, code)
    return exit_codes.FINISHED if code == exit_codes.STOPPED else code


def _crew(arguments: argparse.Namespace) -> Crew:
    crew = Crew(
        run=RunDir(Path(arguments.run)),
        attempt=arguments.attempt,
        num_workers=arguments.num_workers,
        cpus_per_worker=arguments.cpus_per_worker,
    )
    if arguments.meet is None:
        return crew
    place = step_place(os.environ)
    return replace(crew, meeting=Meeting.parse(arguments.meet), node_rank=place.node_rank, num_nodes=place.num_nodes)


def _work(crew: Crew, worker_module: str) -> int:
    """Take the port, import, fork, and wait for all."""
    os.environ.update({**defaults_for_workers(crew), **os.environ})
    try:
        with ExitStack() as resources:
            meeting_point = resources.enter_context(listen(crew.meeting)) if crew.node_rank == 0 else None
            worker = importlib.import_module(worker_module)
            worker.preload(str(crew.run.path))
            ranks = _fork(crew, worker, meeting_point)
    except PortTakenError:
        return exit_codes.PORT_TAKEN
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
        report(crew.run.agent_error(crew.attempt, crew.node_rank), error, rank=-1, log=crew.run.console)
        return exit_codes.REFUSED if isinstance(error, ConfigError) else exit_codes.FAILED
    return joint_exit_code(_await_all(crew, ranks))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.agent", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--worker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--cpus-per-worker", type=int)
    parser.add_argument("--meet", metavar="'ADDRESS PORT'")
    return parser.parse_args(argv)


def defaults_for_workers(crew: Crew) -> dict[str, str]:
    """Return the variables that libraries read when they are loaded; the user's own values win over them."""
    return {**torch_defaults(crew.num_threads), **network_defaults(crew.meeting.address)}


def _fork(crew: Crew, worker: ModuleType, meeting_point: socket.socket | None) -> dict[int, int]:
    """Fork the workers; return their ranks by pid."""
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    port = meeting_point.getsockname()[1] if meeting_point else crew.meeting.port
    agent_pid = os.getpid()
    ranks: dict[int, int] = {}
    for local_rank in range(crew.num_workers):
        rank = crew.node_rank * crew.num_workers + local_rank
        pid = os.fork()
        if pid == 0:
            os.environ.update(rank_environ(crew, local_rank, port))
            _become_worker(crew, worker, rank, meeting_point, agent_pid)
        ranks[pid] = rank
    return ranks


def _become_worker(
    crew: Crew, worker: ModuleType, rank: int, meeting_point: socket.socket | None, agent_pid: int
) -> None:
    """Run one worker in this forked process; never return. Leaves without Python's shutdown, in which torch can abort."""
    code = exit_codes.FAILED
    try:
        processes.die_with_parent(agent_pid)
        os.sched_setaffinity(0, crew.cpu_sets[rank % crew.num_workers])
        listen_fd = os.dup(meeting_point.fileno()) if meeting_point and rank == 0 else None
        if meeting_point:
            meeting_point.close()
        code = worker.main(str(crew.run.path), os.environ, attempt=crew.attempt, listen_fd=listen_fd)
    except BaseException:  # noqa: BLE001  nothing may return into the agent's own code
        traceback.print_exc()
    finally:
        leave_at_once(code)


def rank_environ(crew: Crew, local_rank: int, port: int) -> Mapping[str, str]:
    """Return the variables that every PyTorch launcher sets; nodes have as many workers each."""
    return {
        "RANK": str(crew.node_rank * crew.num_workers + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(crew.num_nodes * crew.num_workers),
        "LOCAL_WORLD_SIZE": str(crew.num_workers),
        "NODE_RANK": str(crew.node_rank),
        "MASTER_ADDR": crew.meeting.address,
        "MASTER_PORT": str(port),
    }


def _await_all(crew: Crew, ranks: Mapping[int, int]) -> dict[int, int]:
    """Return every rank's exit code; pass stop signals on; after a failure, kill who does not leave by himself."""
    codes: dict[int, int] = {}
    alive = set(ranks)
    deadline: float | None = None
    while alive:
        timeout_s = 3600.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
        number = processes.await_signal(timeout_s)
        if number in processes.STOP_SIGNALS:
            processes.send(alive, number)
        was_killed_by_us = deadline is not None and time.monotonic() >= deadline
        if was_killed_by_us:
            processes.kill(alive)
        for pid, code in processes.reap().items():
            if pid not in ranks:
                continue
            alive.discard(pid)
            codes[ranks[pid]] = code
            if code < 0 and not was_killed_by_us:
                rank = ranks[pid]
                log, told = crew.run.rank_log(crew.attempt, rank), crew.run.rank_error(crew.attempt, rank)
                report_killed(told, signal.Signals(-code), rank=rank, log=log)
            if code not in (exit_codes.FINISHED, exit_codes.STOPPED) and deadline is None:
                deadline = time.monotonic() + GRACE_S
    return codes


def joint_exit_code(codes: Mapping[int, int]) -> int:
    """Return what the workers' exit codes mean together."""
    if all(code == exit_codes.FINISHED for code in codes.values()):
        return exit_codes.FINISHED
    if all(code in (exit_codes.FINISHED, exit_codes.STOPPED) for code in codes.values()):
        return exit_codes.STOPPED
    return exit_codes.REFUSED if exit_codes.REFUSED in codes.values() else exit_codes.FAILED


if __name__ == "__main__":
    sys.exit(main())
