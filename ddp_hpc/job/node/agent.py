"""The node agent: imports what all workers need once, forks one worker for each GPU, and ends all when one fails.

    python -m ddp_hpc.job.node.agent RUN_DIR --worker ddp_hpc.train.worker --stop-signal USR2 --num-workers 4

It reads the supervisor's orders from its standard input and writes reports to its standard output (see `job.wire.control_channel`): orders to
start, stop or kill the workers of an attempt, reports of their joint exit code. It keeps running for the next attempt,
which then has nothing to import, until the supervisor closes the connection. With `--in-step`, srun has started one agent
on each node of a job, and the node rank comes from Slurm; else this machine is the only node.

The worker is a module named on the command line, so that this one stays free of torch. It offers `preload(run)`, called
once before the first fork, and `main(run, environ, attempt=, listen_fd=)`, which returns the worker's exit code. Where
`preload` returns a reason not to fork, workers are new processes (`spawned_worker`), which import everything themselves.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import ConfigError, exit_code_of
from ddp_hpc.base.patience import ask_once
from ddp_hpc.cluster.machine.cgroups import MemoryKills, memory_kills, whose_memory_ran_out
from ddp_hpc.cluster.rank_probe.deadlines import HangCollector, run_in_child, run_in_thread
from ddp_hpc.cluster.rank_probe.folder import make_folder
from ddp_hpc.cluster.rendezvous.address import this_host
from ddp_hpc.cluster.rendezvous.choose_network import LOOPBACK_ADDRESS
from ddp_hpc.cluster.rendezvous.worker_env import (
    PROBE_FOLDER,
    PROBES_ITSELF,
    WorkerEnv,
    endpoint_of_run,
    keep_users_values,
    launched_worker_env,
    library_variables,
    node_variables,
    probe_variables,
    ranks_by_shape,
)
from ddp_hpc.cluster.slurm.allocation import step_task
from ddp_hpc.job.node.cpus import restrict_to_cpus, share_node_cpus
from ddp_hpc.job.node.python_environ import (
    exclude_imports_from_gc,
    exit_at_once,
    import_path_variables,
    make_users_code_importable,
    run_and_exit,
    shorten_tmpdir,
)
from ddp_hpc.job.node.start_sampler import START_DELAY_S, SamplerProcess, end_sampling, start_sampling
from ddp_hpc.job.wire.control_channel import ControlChannel
from ddp_hpc.job.wire.endpoint import Endpoint, PortTakenError, listen
from ddp_hpc.run.run_dir.failure_reports import report_failed_start, report_killed, write_rank_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.workload.protocol import WorkerModule, load_worker

REPORT_WAIT_S = 1.0
"""How long the others may take to write their error reports, after the first worker has failed."""
LOOPBACK_ENDPOINT = Endpoint(LOOPBACK_ADDRESS, 0)
"""The endpoint of a run on this machine alone: the kernel chooses the port."""


@dataclass
class WorkerGroup:
    """The workers of one attempt while they run."""

    attempt: int
    ranks: Mapping[int, int]
    """Rank by pid."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code by rank, of those that have ended."""
    deadline: float | None = None
    """When the agent kills those that still run."""
    was_cut: bool = False
    """Whether it has killed them."""
    memory_kills: MemoryKills | None = field(default_factory=memory_kills)
    """What the kernel had killed in this cgroup when they were started."""
    collector: HangCollector | None = None
    sampled_from: float = field(default_factory=lambda: time.monotonic() + START_DELAY_S)
    """When the sampling of this node begins; never again once it has."""
    sampler: SamplerProcess | None = None

    @property
    def alive_pids(self) -> set[int]:
        return {pid for pid, rank in self.ranks.items() if rank not in self.codes}

    def end_within(self, seconds: float) -> None:
        """Kill the workers that still run after this time; an earlier deadline stays."""
        end = time.monotonic() + seconds
        self.deadline = end if self.deadline is None else min(self.deadline, end)


class Agent:
    """One node's agent: carries out orders until the connection is closed."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        line: ControlChannel,
        python: Mapping[str, str],
        import_paths: Sequence[str],
    ) -> None:
        self._run = RunDir(arguments.run)
        self._arguments = arguments
        self._line = line
        self._given: Mapping[str, str] = {}
        """What this agent has set in its own environment."""
        self._python = python
        """Variables that decide where a Python that this agent starts imports from."""
        self._import_paths = import_paths
        place = step_task(os.environ) if arguments.in_step else None
        self._node_rank = place.node_rank if place else 0
        self._num_nodes = place.num_nodes if place else 1
        self._share = share_node_cpus(os.environ, arguments.num_workers, arguments.cpus_per_worker)
        if self._share.note and self._node_rank == 0:
            sys.stderr.write(f"note: {self._share.note}\n")
        self._worker: WorkerModule | None = None
        self._must_not_fork = False
        self._group: WorkerGroup | None = None
        self._is_stop_pending = False
        """Whether a stop signal came while no worker ran."""
        self._interruptions = processes.find_blocked_interruptions()
        self._probes = make_folder()
        shorten_tmpdir(self._probes, os.environ, says=self._node_rank == 0)

    def serve(self) -> None:
        """Carry out the supervisor's orders until it closes the connection; then kill the workers that are left."""
        with closing(self._probes) if self._probes else nullcontext():  # a forked worker leaves by `os._exit`
            failure = self._preload()
            while True:
                for order in self._line.read():
                    self._obey_order(order, failure)
                if self._line.is_closed:
                    break
                number = processes.await_signal(self._patience_s(), self._interruptions)
                if number in {*processes.STOP_SIGNALS, *self._interruptions}:
                    self._ask_workers_to_stop()
                self._look_after_workers()
            if self._group:
                self._kill_workers(self._group.alive_pids)

    def _kill_workers(self, pids: Collection[int]) -> None:
        """Kill workers, and what they have started where it does not end with them."""
        kill = processes.kill_all_below if getattr(self._worker, "OUTLIVED", False) else processes.kill
        kill(pids)

    def _ask_workers_to_stop(self) -> None:
        """Send the workload's stop signal to the workers; where none runs, keep it for the next ones."""
        self._is_stop_pending = self._group is None
        if self._group:
            processes.send_signal(self._group.alive_pids, self._arguments.stop_signal)

    def _preload(self) -> BaseException | None:
        """Import what the workers need; return the error, which is reported once an attempt is known."""
        libraries = keep_users_values(library_variables(self._share.threads), os.environ)
        self._given = WorkerEnv(process="agent", variables=libraries).given
        os.environ.update(self._given)
        try:
            with exclude_imports_from_gc():
                self._worker = load_worker(self._arguments.worker)
                reason = self._worker.preload(str(self._run.path))
        except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
            return error
        self._must_not_fork = bool(reason)
        if reason and self._node_rank == 0:
            sys.stderr.write(
                f"note: each rank's worker starts as a new process and imports its modules itself, which is slower, because {reason}\n"
            )
        return None

    def _obey_order(self, order: Mapping[str, Any], failure: BaseException | None) -> None:
        match order:
            case {"do": "start", "attempt": int(attempt), **rest}:
                endpoint = Endpoint.parse(str(rest["meet"])) if "meet" in rest else LOOPBACK_ENDPOINT
                self._start_workers(attempt, endpoint, failure)
            case {"do": "stop"} if self._group:
                self._ask_workers_to_stop()
            case {"do": "end"} if self._group:
                self._group.end_within(REPORT_WAIT_S)

    def _start_workers(self, attempt: int, endpoint: Endpoint, failure: BaseException | None) -> None:
        """Bind the port and start the workers, or report why that fails."""
        if self._worker is None or failure is not None:
            self._report_failure(attempt, failure)
            return
        num_workers = self._arguments.num_workers
        try:
            processes.allow_open_files(self._num_nodes * num_workers)
            collector = None
            if self._probes:
                ranks = range(self._node_rank * num_workers, (self._node_rank + 1) * num_workers)
                collector = _make_hang_collector(
                    self._run, attempt, self._probes.path, ranks, may_fork=not self._must_not_fork
                )
            with listen(endpoint) if self._node_rank == 0 else nullcontext() as meeting_point:
                port = meeting_point.getsockname()[1] if meeting_point else endpoint.port
                environs = self._worker_environs(endpoint, port)
                if self._must_not_fork:
                    by_pid = self._spawn_workers(attempt, environs, meeting_point)
                else:
                    by_pid = self._fork_workers(self._worker, attempt, environs, meeting_point)
                self._group = WorkerGroup(attempt, by_pid, collector=collector)
            if self._is_stop_pending:
                self._ask_workers_to_stop()
        except PortTakenError:
            self._report_end(attempt, exit_codes.PORT_TAKEN)
        except (ConfigError, OSError) as error:
            self._report_failure(attempt, error)

    def _worker_environs(self, endpoint: Endpoint, port: int) -> dict[int, dict[str, str]]:
        """Return by rank the variables of this node's workers; each node has the same number of workers."""
        shape = {"node_rank": self._node_rank, "num_nodes": self._num_nodes, "num_workers": self._arguments.num_workers}
        node = node_variables(this_host().interface_towards(endpoint.address), self._share.threads)
        address = endpoint_of_run(endpoint.address, port, is_alone=endpoint == LOOPBACK_ENDPOINT)
        # A variable that the recipe's import has set or removed counts as set or removed by the user.
        users = {
            **{name: "" for name in self._given if name not in os.environ},
            **{name: value for name, value in os.environ.items() if self._given.get(name) != value},
        }
        probe = probe_variables(self._probes.path if self._probes else None)
        first = self._node_rank * self._arguments.num_workers
        environs = {}
        for local_rank in range(self._arguments.num_workers):
            ranks = ranks_by_shape(**shape, local_rank=local_rank)
            worker_env = launched_worker_env("an agent", {**ranks, **address, **node}, users, self._import_paths)
            environs[first + local_rank] = {**worker_env.environ, **probe}
        return environs

    def _spawn_workers(
        self, attempt: int, environs: Mapping[int, Mapping[str, str]], meeting_point: socket.socket | None
    ) -> dict[int, int]:
        """Start each worker as a new process, without fork; return their ranks by pid."""
        sys.stdout.flush()
        by_pid: dict[int, int] = {}
        for (rank, environ), cpu_set in zip(environs.items(), self._share.cpu_sets, strict=True):
            options = [f"--worker={self._arguments.worker}", f"--attempt={attempt}"]
            options += [f"--agent={os.getpid()}", f"--cpus={','.join(map(str, cpu_set))}"]
            if meeting_point and rank == 0:
                meeting_point.set_inheritable(True)
                options.append(f"--listen-fd={meeting_point.fileno()}")
            argv = [sys.executable, "-m", "ddp_hpc.job.node.spawned_worker", str(self._run.path), *options]
            try:
                by_pid[os.posix_spawn(sys.executable, argv, {**os.environ, **environ, **self._python})] = rank
            except OSError:
                processes.kill(by_pid)
                raise
            finally:
                if meeting_point:
                    meeting_point.set_inheritable(False)
        return by_pid

    def _fork_workers(
        self,
        worker: WorkerModule,
        attempt: int,
        environs: Mapping[int, Mapping[str, str]],
        meeting_point: socket.socket | None,
    ) -> dict[int, int]:
        """Fork the workers; return their ranks by pid."""
        gc.freeze()  # the workers share these pages: a garbage collection in one of them would write to them, and so copy them
        sys.stdout.flush()  # fork copies the buffer too, and each worker would print it again
        # Before the fork: a worker compares its parent with it, in case the agent dies meanwhile.
        agent_pid = os.getpid()
        by_pid: dict[int, int] = {}
        for (rank, environ), cpu_set in zip(environs.items(), self._share.cpu_sets, strict=True):
            try:
                pid = os.fork()
            except OSError as error:
                processes.kill(by_pid)
                for forked in by_pid:  # so that none runs any more when the agent reports the end
                    os.waitpid(forked, 0)
                raise OSError(
                    error.errno,
                    f"this node's agent cannot fork the worker of rank {rank}: {error.strerror}. The node has no memory left, or the "
                    "user or the job has too many processes: raise `ulimit -u`, or the limit of the job's cgroup (pids.max)",
                ) from error
            if pid == 0:
                code = exit_codes.FAILED
                try:
                    processes.die_with_parent(agent_pid)
                    os.environ.update(environ)
                    restrict_to_cpus(cpu_set, os.environ)
                    fd = os.dup(meeting_point.fileno()) if meeting_point and rank == 0 else None
                    if meeting_point:
                        # Each worker has inherited the socket. The port stays bound while any process holds it, so all but
                        # rank zero close it, and rank zero keeps the duplicate that its store listens on.
                        meeting_point.close()
                    code = worker.main(str(self._run.path), os.environ, attempt=attempt, listen_fd=fd)
                except BaseException:  # noqa: BLE001  nothing may return into the agent's own code
                    traceback.print_exc()
                finally:
                    exit_at_once(code)
            by_pid[pid] = rank
        return by_pid

    def _report_failure(self, attempt: int, error: BaseException | None) -> None:
        """Write the error report of an agent that cannot start its workers."""
        error = error or RuntimeError("the agent has not imported the workers' module")
        report_failed_start(self._run.agent_error(attempt, self._node_rank), error, rank=-1, log=self._run.console)
        self._report_end(attempt, exit_code_of(error))

    def _report_end(self, attempt: int, code: int) -> None:
        self._line.send(node_rank=self._node_rank, attempt=attempt, code=code)

    def _patience_s(self) -> float:
        if self._group is None:
            return 3600.0
        if self._group.deadline is None:
            to_sample = max(0.0, self._group.sampled_from - time.monotonic())
            return min(3600.0, to_sample, self._group.collector.patience_s() if self._group.collector else 3600.0)
        return 1.0 if self._group.was_cut else self._group.deadline - time.monotonic()

    def _look_after_workers(self) -> None:
        """Record the workers that have exited; after the last one, report to the supervisor."""
        died, group = processes.reap_children(), self._group
        if group is None:
            return
        if group.deadline is not None and time.monotonic() >= group.deadline and not group.was_cut:
            group.was_cut = True
            self._kill_workers(group.alive_pids)
        for pid, code in died.items():
            if pid in group.ranks:
                self._note_exit(group, group.ranks[pid], code)
        if group.collector and group.deadline is None:
            group.collector.look()
        if group.deadline is None and group.alive_pids and time.monotonic() >= group.sampled_from:
            environ, num_gpus = {**os.environ, **self._python}, self._arguments.gpus
            group.sampled_from = float("inf")
            group.sampler = start_sampling(
                self._run, environ, attempt=group.attempt, node_rank=self._node_rank, num_gpus=num_gpus
            )
        if not group.alive_pids:
            self._group = None
            end_sampling(group.sampler)
            self._report_end(group.attempt, exit_codes.combined_exit_code(group.codes.values()))

    def _note_exit(self, group: WorkerGroup, rank: int, code: int) -> None:
        """Record a worker's exit code, write the report that a killed worker could not write, set the others' deadline."""
        is_ours = group.was_cut and code == -signal.SIGKILL
        first = next(iter(group.codes.values()), None)
        if is_ours and first in exit_codes.GOOD_CODES and self._arguments.teardown_s is not None:
            code = first  # it had committed with the others, and hung only on its way to exit; a script may still have to save
        group.codes[rank] = code
        if code not in exit_codes.GOOD_CODES and not is_ours and group.deadline is None:
            write_rank_end(self._run, group.attempt, rank, code)
        path, log = self._run.rank_error(group.attempt, rank), self._run.rank_log(group.attempt, rank)
        has_reported = ask_once(path, path.exists, unknown=False)  # such a rank may end by a signal of NCCL's
        if code < 0 and not is_ours and not has_reported:
            report_killed(path, -code, rank=rank, log=log, memory_ran_out=whose_memory_ran_out(group.memory_kills))
        limit_s = self._arguments.teardown_s if code in exit_codes.GOOD_CODES else REPORT_WAIT_S
        if limit_s is not None:
            group.end_within(limit_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one supervisor."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.job.node.agent", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--worker", required=True)
    parser.add_argument("--stop-signal", type=processes.signal_number, default="USR2", metavar="NAME")
    parser.add_argument("--teardown-s", type=float)
    parser.add_argument("--num-workers", type=int, required=True)
    parser.add_argument("--cpus-per-worker", type=int)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--in-step", action="store_true")
    arguments = parser.parse_args(argv)
    processes.die_with_parent(os.getppid())  # no worker trains on after its supervisor was killed
    # Before the first fork, too: a stop signal that comes between two attempts, or before a worker has installed its handlers,
    # then stays pending instead of killing the process.
    processes.block_awaited_signals()
    processes.block_interruptions()
    python = import_path_variables(os.environ)
    for name in (PROBE_FOLDER, PROBES_ITSELF):  # of a rank from whose script this run was submitted
        os.environ.pop(name, None)
    import_paths = make_users_code_importable(os.environ)
    Agent(arguments, ControlChannel.of_agent(), python, import_paths).serve()
    return exit_codes.FINISHED


def _make_hang_collector(run: RunDir, attempt: int, folder: Path, ranks: range, *, may_fork: bool) -> HangCollector:
    """Return what asks this node's workers what they do, shortly before their watchdogs end them."""
    # A file system that does not answer is a frequent reason for a hang, and the agent must obey orders all the same.
    # A thread may not be there when the next attempt's workers are forked.
    collector = HangCollector(run, attempt, folder, ranks, run_in_child if may_fork else run_in_thread)
    collector.forget()
    return collector


if __name__ == "__main__":
    run_and_exit(main)
