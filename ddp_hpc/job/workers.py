"""The workers of an attempt, whichever launcher starts them: to start, ask to stop, kill, and wait for."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.job.launcher import STEP_ARGV_BY_LAUNCHER, agent_argv, agents_step_argv
from ddp_hpc.job.wire import subprocesses
from ddp_hpc.job.wire.control_channel import ControlChannel
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import ask_to_stop, take_rank_zero_exit

REPORT_TIMEOUT_S = 15.0
"""How long other nodes may take to report, after one has reported a failure or the agents were ordered to end."""

_STOP_SIGNAL_EXIT_CODES = frozenset(
    code for number in (*processes.STOP_SIGNALS, *processes.INTERRUPT_SIGNALS) for code in (128 + number, -number)
)
"""Exit codes of a step whose processes a stop signal killed. It kills only processes without handlers: their Python has
just started, so no training had begun."""


class Workers(ABC):
    """All workers of a run, on all its nodes, for one attempt after another."""

    def __init__(self, *, lock_fds: Sequence[int], leave_s: float = REPORT_TIMEOUT_S) -> None:
        self._lock_fds, self._leave_s = lock_fds, leave_s
        self._attempt = -1
        self._deadline: float | None = None
        """Until when processes that were ordered to end may run."""
        self.step_code: int | None = None
        """Exit code of the command that started them, once it has ended; minus the number of a signal."""

    @abstractmethod
    def begin(self, attempt: int, endpoint: Endpoint | None) -> None:
        """Start them for an attempt; without an endpoint, all run on this machine."""

    @abstractmethod
    def stop(self) -> None:
        """Ask them to commit a checkpoint and exit."""

    @abstractmethod
    def end(self) -> None:
        """Kill them after a short time."""

    @abstractmethod
    def poll(self) -> int | None:
        """Return their joint exit code once all have exited, else None; call it again and again."""

    def patience_s(self) -> float:
        """Return how long to wait at most before the next `poll`."""
        return 3600.0 if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def silent_nodes(self) -> list[int]:
        """Return the ranks of nodes that did not report how their workers ended; srun does not say on which node a task was lost."""
        return []

    @abstractmethod
    def close(self) -> None:
        """End all processes, and close all connections."""


class AgentWorkers(Workers):
    """Workers that an agent on each node forks, and forks again for the next attempt."""

    def __init__(self, argv: Sequence[str], *, num_nodes: int, **more: Any) -> None:
        super().__init__(**more)
        self._argv, self._num_nodes = argv, num_nodes
        self._step: _AgentsStep | None = None
        self._codes: dict[int, int] = {}
        self._is_forced = False

    def begin(self, attempt: int, endpoint: Endpoint | None) -> None:
        """Order all agents to start their workers; start the agents first where none runs."""
        self._attempt, self._codes, self._deadline, self._is_forced = attempt, {}, None, False
        self.step_code = None
        if self._step is not None and self._step.is_over():
            self._step.line.close()
            self._step = None
        if self._step is None:
            self._step = _AgentsStep(self._argv, self._lock_fds)
        where = {} if endpoint is None else {"meet": str(endpoint)}
        self._step.line.send(do="start", attempt=attempt, **where)

    def stop(self) -> None:
        """Order all agents to ask their workers to stop."""
        if self._step:
            self._step.line.send(do="stop")

    def end(self) -> None:
        """Order all agents to kill their workers; end the step where some do not report in time."""
        if self._step and self._deadline is None:
            self._step.line.send(do="end")
            self._deadline = time.monotonic() + self._leave_s

    def poll(self) -> int | None:
        """Read all agents' reports; when one reports a failure, order the others to kill their workers."""
        assert self._step is not None  # noqa: S101  `begin` comes first
        is_over = self._step.is_over()  # asked first, so that the last reports are not missed
        for report in self._step.line.read():
            if report.get("attempt") == self._attempt:
                self._codes[int(report["node_rank"])] = int(report["code"])
        if len(self._codes) == self._num_nodes:
            return self._joint_code()
        if is_over:
            self.step_code = self._step.code
            silent_code = _code_of_silent_workers(self._step.code, is_ours=self._deadline is not None)
            self._step.line.close()
            self._step = None
            return self._joint_code(silent_code)
        if any(code not in exit_codes.GOOD_CODES for code in self._codes.values()):
            self.end()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._is_forced = True
            self._step.end()
            self._deadline += self._leave_s
        return None

    def silent_nodes(self) -> list[int]:
        """Return the nodes that did not answer the order to end; none where the step ended before that order."""
        return [rank for rank in range(self._num_nodes) if rank not in self._codes] if self._is_forced else []

    def close(self) -> None:
        """Close the connection: agents exit when they read end of file."""
        if self._step is None:
            return
        self._step.line.close()
        self._step.await_end(self._leave_s)
        self._step = None

    def _joint_code(self, silent_code: int = exit_codes.FAILED) -> int:
        """Return what the nodes' codes mean together, with `silent_code` for those that reported nothing."""
        codes = [self._codes.get(rank, silent_code) for rank in range(self._num_nodes)]
        return exit_codes.combined_exit_code(codes, rank_zero=codes[0])


class _Step:
    """A job step, or an agent on this machine."""

    def __init__(self, argv: Sequence[str], lock_fds: Sequence[int], *, on_line: bool = False) -> None:
        self._process = subprocesses.start_command(argv, lock_fds, on_line=on_line)
        self._is_terminated = False

    @property
    def code(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._process.poll()

    def is_over(self) -> bool:
        return self.code is not None

    def end(self) -> None:
        """Ask srun to end its step; the second time, kill srun."""
        # At SIGTERM, srun ends its step on all nodes. SIGKILL cannot be caught, so srun passes nothing on, and its tasks may
        # run on until Slurm notices (srun(1), https://slurm.schedmd.com/srun.html). So SIGKILL comes second.
        if not self.is_over():
            end = processes.kill if self._is_terminated else processes.terminate
            end([self._process.pid])
        self._is_terminated = True

    def await_end(self, patience_s: float) -> None:
        """Wait until it has ended; end it where that takes too long."""
        deadline = time.monotonic() + patience_s
        while not self.is_over():
            processes.await_signal(0.1)
            if time.monotonic() >= deadline:
                deadline += patience_s
                self.end()

    def ask_to_stop(self) -> None:
        """Send the stop signal, which srun passes on."""
        processes.request_stop([self._process.pid])


class _AgentsStep(_Step):
    """The agents' job step, and the connection to it."""

    def __init__(self, argv: Sequence[str], lock_fds: Sequence[int]) -> None:
        super().__init__(argv, lock_fds, on_line=True)
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None  # noqa: S101  `on_line`
        assert stdout is not None  # noqa: S101
        self.line = ControlChannel(os.dup(stdout.fileno()), os.dup(stdin.fileno()))
        stdin.close()
        stdout.close()


class TaskWorkers(Workers):
    """Workers that srun or torchrun start, as a step of its own for each attempt."""

    def __init__(self, run: RunDir, argv_of: Callable[[int, Endpoint], Sequence[str]], **more: Any) -> None:
        super().__init__(**more)
        self._run, self._argv_of = run, argv_of
        self._step: _Step | None = None

    def begin(self, attempt: int, endpoint: Endpoint | None) -> None:
        assert endpoint is not None  # noqa: S101  only agents work without Slurm
        self._attempt, self._deadline, self.step_code = attempt, None, None
        self._step = _Step(self._argv_of(attempt, endpoint), self._lock_fds)

    def stop(self) -> None:
        """Ask by the signal that srun passes on, and by the file that rank zero looks for."""
        with suppress(OSError):  # the disk may be full; the signal reaches most ranks all the same
            # The file would stop a newer attempt; and a user's own says what is to follow.
            if not ownership.is_fenced(self._run, self._attempt) and not self._run.stop_request.exists():
                ask_to_stop(self._run, by="supervisor")
        if self._step:
            self._step.ask_to_stop()

    def end(self) -> None:
        """Ask srun to end the step; the second time, kill srun."""
        self._deadline = time.monotonic() + self._leave_s
        if self._step:
            self._step.end()

    def poll(self) -> int | None:
        """Return the exit code that rank zero recorded, once srun has exited."""
        assert self._step is not None  # noqa: S101  `begin` comes first
        code = self._step.code
        if code is None:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.end()
            return None
        self.step_code = code
        silent_code = _code_of_silent_workers(code, is_ours=self._deadline is not None)
        return _code_of_step(self._run, self._attempt, code, silent_code=silent_code)

    def close(self) -> None:
        """End the step where it still runs."""
        if self._step and not self._step.is_over():
            self._step.end()
            self._step.await_end(self._leave_s)


def _code_of_silent_workers(code: int | None, *, is_ours: bool) -> int:
    """Return the code for workers that reported nothing when their step ended; `is_ours` where this process ended it."""
    return exit_codes.STOPPED_BEFORE_START if code in _STOP_SIGNAL_EXIT_CODES and not is_ours else exit_codes.FAILED


def _code_of_step(run: RunDir, attempt: int, code: int, *, silent_code: int) -> int:
    """Return what a step's end means: what rank zero recorded, or else what the first error report says."""
    rank_zero_code = take_rank_zero_exit(run, attempt)
    if rank_zero_code is not None and code == exit_codes.FINISHED:
        return exit_codes.combined_exit_code([rank_zero_code], rank_zero=rank_zero_code)
    failure = first_failure(run, attempt)
    if failure is not None:
        others = exit_codes.REFUSED if failure.is_input_error else exit_codes.FAILED
    else:
        others = silent_code if rank_zero_code is None else exit_codes.FAILED
    return exit_codes.combined_exit_code([others], rank_zero=others if rank_zero_code is None else rank_zero_code)


def make_workers(context: JobContext, lock_fds: Sequence[int]) -> Workers:
    """Return what starts the workers of this launcher."""
    if context.is_for_slurm and context.spec.launcher in STEP_ARGV_BY_LAUNCHER:
        return TaskWorkers(
            context.run, partial(STEP_ARGV_BY_LAUNCHER[context.spec.launcher], context), lock_fds=lock_fds
        )
    argv = agents_step_argv(context) if context.is_for_slurm else agent_argv(context)
    return AgentWorkers(argv, num_nodes=context.world.num_nodes, lock_fds=lock_fds)
