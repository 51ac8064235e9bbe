"""The node agent: imports what all workers need once, forks one worker a GPU, and sees that they die together.

    python -m ddp_hpc.job.agent RUN_DIR --worker ddp_hpc.train.worker --attempt 0 --num-workers 4

The worker is a module named on the command line, so that this one stays free of torch. It offers `preload(run)`, called
before the fork, and `main(run, environ, attempt=, listen_fd=)`, which returns the worker's exit code.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from ddp_hpc import exit_codes, processes
from ddp_hpc.durable import replace_text
from ddp_hpc.errors import ConfigError
from ddp_hpc.records import WorkerFailure
from ddp_hpc.run_dir import RunDir

GRACE_S = 1.0
"""How long workers may still write down why they fail, once the first is dead."""
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Crew:
    """The workers of this node, and where the group meets."""

    run: RunDir
    attempt: int
    num_workers: int
    cpus_per_worker: int | None

    @property
    def cpu_sets(self) -> list[tuple[int, ...]]:
        return processes.share_cpus(sorted(os.sched_getaffinity(0)), self.num_workers, self.cpus_per_worker)

    @property
    def num_threads(self) -> int:
        """Threads of each worker: its CPUs, or one where workers share them."""
        first = self.cpu_sets[0]
        is_shared = self.num_workers > 1 and first == self.cpu_sets[-1]
        return 1 if is_shared else len(first)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the workers and see them through; return what their exit codes mean together."""
    arguments = _parse(argv)
    crew = Crew(
        run=RunDir(Path(arguments.run)),
        attempt=arguments.attempt,
        num_workers=arguments.num_workers,
        cpus_per_worker=arguments.cpus_per_worker,
    )
    processes.die_with_parent(os.getppid())
    processes.block_awaited_signals()
    os.environ.update({**defaults_for_workers(crew), **os.environ})
    try:
        worker = importlib.import_module(arguments.worker)
        worker.preload(str(crew.run.path))
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
        _report(crew, "agent-0", error)
        return exit_codes.REFUSED if isinstance(error, ConfigError) else exit_codes.FAILED
    return _lead(crew, worker)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.agent", description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--worker", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--cpus-per-worker", type=int)
    return parser.parse_args(argv)


def defaults_for_workers(crew: Crew) -> dict[str, str]:
    """Return the variables that libraries read when they are loaded; the user's own values win over them."""
    loopback = next(
        (name for name, addresses in psutil.net_if_addrs().items() if any(a.address == _LOOPBACK for a in addresses)),
        None,
    )
    interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback} if loopback else {}
    return {
        "OMP_NUM_THREADS": str(crew.num_threads),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # what `train.deterministic` needs of cuBLAS, read when it is loaded
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for GPUs must not initialise CUDA before the fork
        **interfaces,
    }


def _lead(crew: Crew, worker: ModuleType) -> int:
    """Fork the workers and wait for all; when one fails, the others follow."""
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    with socket.create_server((_LOOPBACK, 0)) as meeting_point:
        agent_pid = os.getpid()
        ranks: dict[int, int] = {}
        for rank in range(crew.num_workers):
            pid = os.fork()
            if pid == 0:
                _become_worker(crew, worker, rank, meeting_point, agent_pid)
            ranks[pid] = rank
    return joint_exit_code(_await_all(crew, ranks))


def _become_worker(crew: Crew, worker: ModuleType, rank: int, meeting_point: socket.socket, agent_pid: int) -> None:
    """Run one worker in this forked process; never return. Leaves without Python's shutdown, in which torch can abort."""
    code = exit_codes.FAILED
    try:
        processes.die_with_parent(agent_pid)
        os.sched_setaffinity(0, crew.cpu_sets[rank])
        os.environ.update(rank_environ(rank, crew.num_workers, meeting_point.getsockname()[1]))
        listen_fd = os.dup(meeting_point.fileno()) if rank == 0 else None
        meeting_point.close()
        code = worker.main(str(crew.run.path), os.environ, attempt=crew.attempt, listen_fd=listen_fd)
    except BaseException:  # noqa: BLE001  nothing may return into the agent's own code
        traceback.print_exc()
    finally:
        with suppress(OSError):  # the disk of the log may be full
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def rank_environ(rank: int, world_size: int, port: int) -> Mapping[str, str]:
    """Return the variables that every PyTorch launcher sets, for a world on this machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": _LOOPBACK,
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
                _report_killed(crew, ranks[pid], signal.Signals(-code))
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


def _report_killed(crew: Crew, rank: int, number: signal.Signals) -> None:
    """Write down the death of a worker that had no time to do it."""
    hint = " The kernel does that when memory runs out." if number == signal.SIGKILL else ""
    failure = WorkerFailure(
        rank=rank,
        exception=f"killed by {number.name}.{hint}",
        log=str(crew.run.rank_log(crew.attempt, rank)),
        **_here_and_now(),
    )
    _write_failure(crew.run.rank_error(crew.attempt, rank), failure)


def _report(crew: Crew, name: str, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(f"error: {error}\n" if isinstance(error, ConfigError) else text)
    failure = WorkerFailure(
        rank=-1,
        exception=str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}",
        traceback=text,
        log=str(crew.run.console),
        is_input_error=isinstance(error, ConfigError),
        **_here_and_now(),
    )
    _write_failure(crew.run.attempt_errors(crew.attempt) / f"{name}.json", failure)


def _here_and_now() -> dict[str, Any]:
    return {"host": socket.gethostname(), "at": time.time(), "step": 0}


def _write_failure(path: Path, failure: WorkerFailure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(asdict(failure), indent=1))


if __name__ == "__main__":
    sys.exit(main())
