"""The workers of an attempt, however they are started: begun, told to stop, ended, waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from ddp_hpc import exit_codes, ownership, processes
from ddp_hpc.failure_reports import first_failure
from ddp_hpc.job import children
from ddp_hpc.job.line import Line
from ddp_hpc.job.meeting import Meeting
from ddp_hpc.records import ask_to_stop, take_verdict
from ddp_hpc.run_dir import RunDir

LEAVE_S = 15.0
"""How long the others may take to report their end, once a node has reported a failure or its agents were told to go."""

_TOLD_TOO_EARLY = frozenset(code for number in processes.STOP_SIGNALS for code in (128 + number, -number))
"""How a step ends whose processes die of a stop signal. Only those can that do not listen yet: their Python has just
started, so nothing was begun."""


class Workers(Protocol):
    """All workers of a run, on all its nodes."""

    step_code: int | None
    """What the command that started them ended with, once it has; below zero, a signal's number."""

    def begin(self, attempt: int, meeting: Meeting | None) -> None:
        """Start them for an attempt; without a meeting, they have this machine to themselves."""

    def stop(self) -> None:
        """Have them commit and leave."""

    def end(self) -> None:
        """Have them gone soon, whatever they do."""

    def news(self) -> int | None:
        """Return what their exit codes mean together, once all are gone."""

    def patience_s(self) -> float:
        """Return how long to wait at most before the next news."""

    def silent_nodes(self) -> list[int]:
        """Return the ranks of nodes that did not say how their workers ended."""

    def close(self) -> None:
        """Leave nothing behind."""


class ByAgents:
    """Workers that an agent on each node forks, and forks again for the next attempt."""

    def __init__(
        self, argv: Sequence[str], *, num_nodes: int, lock_fds: Sequence[int], leave_s: float = LEAVE_S
    ) -> None:
        self._argv = argv
        self._num_nodes = num_nodes
        self._lock_fds = lock_fds
        self._leave_s = leave_s
        self._step: _Step | None = None
        self._attempt = -1
        self._codes: dict[int, int] = {}
        self._deadline: float | None = None
        self._is_forced = False
        self.step_code: int | None = None

    def begin(self, attempt: int, meeting: Meeting | None) -> None:
        """Order all agents to begin; start them first where they are not there, or no more."""
        self._attempt, self._codes, self._deadline, self._is_forced = attempt, {}, None, False
        self.step_code = None
        if self._step is not None and self._step.is_over():
            self._hang_up()
        if self._step is None:
            self._step = _Step(self._argv, self._lock_fds)
        where = {} if meeting is None else {"meet": str(meeting)}
        self._step.line.send(do="start", attempt=attempt, **where)

    def stop(self) -> None:
        """Order all agents to tell their workers."""
        if self._step:
            self._step.line.send(do="stop")

    def end(self) -> None:
        """Order all agents to end their workers; those who do not say so in time are ended with the step."""
        if self._step and self._deadline is None:
            self._step.line.send(do="end")
            self._deadline = time.monotonic() + self._leave_s

    def news(self) -> int | None:
        """Hear all agents; when one has failed, have the others follow."""
        assert self._step is not None  # noqa: S101  `begin` comes first
        is_over = self._step.is_over()  # asked first, so that the last reports are not missed
        for report in self._step.line.read():
            if report.get("attempt") == self._attempt:
                self._codes[int(report["node_rank"])] = int(report["code"])
        if len(self._codes) == self._num_nodes:
            return self._joint()
        if is_over:
            self.step_code = self._step.code
            untold = _untold(self._step.code, is_ours=self._deadline is not None)
            self._hang_up()
            return self._joint(untold)
        if any(code not in exit_codes.GOOD for code in self._codes.values()):
            self.end()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._is_forced = True
            self._step.end()
            self._deadline += self._leave_s
        return None

    def patience_s(self) -> float:
        return 3600.0 if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def silent_nodes(self) -> list[int]:
        """Return who did not answer the order to end; where the step ended by itself, nobody had to."""
        return [rank for rank in range(self._num_nodes) if rank not in self._codes] if self._is_forced else []

    def close(self) -> None:
        """Hang up: agents that read the end of their line leave."""
        if self._step is None:
            return
        self._step.line.close()
        self._step.await_end(self._leave_s)
        self._step = None

    def _hang_up(self) -> None:
        if self._step:
            self._step.line.close()
        self._step = None

    def _joint(self, untold: int = exit_codes.FAILED) -> int:
        """Return what the nodes' codes mean together, with `untold` for those that said nothing."""
        codes = [self._codes.get(rank, untold) for rank in range(self._num_nodes)]
        return exit_codes.joint(codes, rank_zero=codes[0])


class _Step:
    """The agents' step, and the line to them."""

    def __init__(self, argv: Sequence[str], lock_fds: Sequence[int]) -> None:
        self._process = children.start(argv, lock_fds, on_line=True)
        self._was_told = False
        told, heard = self._process.stdin, self._process.stdout
        assert told is not None  # noqa: S101  `on_line`
        assert heard is not None  # noqa: S101
        self.line = Line(os.dup(heard.fileno()), os.dup(told.fileno()))
        told.close()
        heard.close()

    @property
    def code(self) -> int | None:
        """What it ended with."""
        return self._process.poll()

    def is_over(self) -> bool:
        return self.code is not None

    def end(self) -> None:
        """Have srun end its step, which it takes SIGTERM for; the second time, end it ourselves."""
        if not self.is_over():
            _have_srun_end(self._process.pid, at_once=self._was_told)
        self._was_told = True

    def await_end(self, patience_s: float) -> None:
        """Wait until it is over, and see to it where it takes too long."""
        deadline = time.monotonic() + patience_s
        while not self.is_over():
            processes.await_signal(0.1)
            if time.monotonic() >= deadline:
                deadline += patience_s
                self.end()


class ByTasks:
    """Workers that srun or torchrun start, as a step of its own for each attempt."""

    def __init__(
        self,
        run: RunDir,
        argv_of: Callable[[int, Meeting], Sequence[str]],
        *,
        lock_fds: Sequence[int],
        leave_s: float = LEAVE_S,
    ) -> None:
        self._run = run
        self._argv_of = argv_of
        self._lock_fds = lock_fds
        self._leave_s = leave_s
        self._attempt = -1
        self._is_alive = False
        self._deadline: float | None = None
        self.step_code: int | None = None

    def begin(self, attempt: int, meeting: Meeting | None) -> None:
        """Start the step."""
        assert meeting is not None  # noqa: S101  only agents work without Slurm
        self._attempt, self._deadline, self.step_code = attempt, None, None
        self._process = children.start(self._argv_of(attempt, meeting), self._lock_fds)
        self._is_alive = True

    def stop(self) -> None:
        """Tell them by the signal that srun passes on, and by the file that rank zero looks for."""
        with suppress(OSError):  # a full disk: the signal tells them, too
            if not ownership.is_ousted(self._run, self._attempt):  # else the file would tell a newer attempt
                ask_to_stop(self._run, by="supervisor")
        processes.request_stop([self._process.pid])

    def end(self) -> None:
        """Have srun end the step; where it does not, end srun."""
        is_first, self._deadline = self._deadline is None, time.monotonic() + self._leave_s
        _have_srun_end(self._process.pid, at_once=not is_first)

    def news(self) -> int | None:
        """Return what rank zero left word of, once srun is gone."""
        code = self._process.poll()
        if code is None:
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.end()
            return None
        self._is_alive, self.step_code = False, code
        return _verdict(self._run, self._attempt, code, untold=_untold(code, is_ours=self._deadline is not None))

    def patience_s(self) -> float:
        return 3600.0 if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def silent_nodes(self) -> list[int]:
        return []  # which node a task was lost with, srun does not say

    def close(self) -> None:
        if self._is_alive:
            self.end()
        while self._is_alive and self.news() is None:
            processes.await_signal(0.1)


def _have_srun_end(pid: int, *, at_once: bool) -> None:
    """Have srun end its step, or have it gone."""
    end = processes.kill if at_once else processes.terminate
    end([pid])


def _untold(code: int | None, *, is_ours: bool) -> int:
    """Return what the silence of those means that a step took with it; `is_ours` where we have ended it."""
    return exit_codes.UNHEARD if code in _TOLD_TOO_EARLY and not is_ours else exit_codes.FAILED


def _verdict(run: RunDir, attempt: int, code: int, *, untold: int) -> int:
    """Return what a step's end means: rank zero's word, or else whose fault the first failure was."""
    word = take_verdict(run, attempt)
    if word is not None and code == exit_codes.FINISHED:
        return exit_codes.joint([word], rank_zero=word)
    failure = first_failure(run, attempt)
    if failure is not None:
        others = exit_codes.REFUSED if failure.is_input_error else exit_codes.FAILED
    else:
        others = untold if word is None else exit_codes.FAILED
    return exit_codes.joint([others], rank_zero=others if word is None else word)


def names_of(ranks: Sequence[int], nodes: Sequence[str]) -> list[str]:
    """Return the names of nodes by their ranks."""
    names: Mapping[int, str] = dict(enumerate(nodes))
    return [names[rank] for rank in ranks if rank in names]
