"""Follow a sweep: read where its points stand until all have ended, and send those that are not submitted once Slurm accepts them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_hpc.base.patience import patiently
from ddp_hpc.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.run_dir.ledger import Ledger
from ddp_hpc.run_dir.rereading import LOOK_INTERVAL_S, LastRead
from ddp_hpc.sweep import local
from ddp_hpc.sweep.points import Point
from ddp_hpc.sweep.start import send_left
from ddp_hpc.sweep.states import points_in_queue
from ddp_hpc.sweep.sweep_dir import Sweep, SweepDir, read_sweep
from ddp_hpc.watch.queue import FRESH_S, Ask, Queue, QueueStatus, asker, queue_reader
from ddp_hpc.watch.status import RunStatus, State, read_status

PointWord = State | Literal["not submitted", "not started"]
"""What `status` says of the point's run; or: no job has it; its job has left the queue without beginning the run."""
LONGEST_PAUSE_S = 300.0
"""Where Slurm accepts no other point, how long to wait at most before the next try; the first time it is `FRESH_S`."""
READS_PER_S = 50
"""At most so many runs are read in a second, so that one follower of a large sweep does not load the file system."""
_FAILED = frozenset({"failed", "refused"})


@dataclass(frozen=True, kw_only=True)
class PointState:
    """Where one point stands."""

    word: PointWord
    attempt: int | None = None
    """Of its run, counted from 0; None before the first."""
    reason: str = ""
    is_over: bool = False
    """Whether its run has ended, and no other attempt follows."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """All points at one moment."""

    points: Sequence[Point]
    states: Mapping[int, PointState]
    """By the points' numbers."""
    num_sent: int = 0
    """How many points were sent by this look."""
    problem: str = ""
    """Why something is not known, or could not be sent."""
    is_over: bool = False
    """Whether nothing waits or runs, and nothing is to be sent."""
    is_cancelled: bool = False
    """Whether the user has cancelled the sweep."""


def follow(
    sweep_dir: SweepDir,
    environ: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[Look]:
    """Yield one look after another; the last one is of a sweep in which nothing waits, runs or is to be sent.

    Raises:
        ConfigError: where the sweep's files are damaged.
    """
    follower = _Follower(sweep_dir, environ, clock)
    while True:
        began = clock()
        look = follower.look()
        yield look
        if look.is_over:
            return
        num_read = sum(not state.is_over and state.attempt is not None for state in look.states.values())
        pause(max(LOOK_INTERVAL_S, num_read / READS_PER_S, clock() - began))


class _Follower:
    """What is remembered from one look to the next."""

    def __init__(self, sweep_dir: SweepDir, environ: Mapping[str, str], clock: Callable[[], float]) -> None:
        self._sweep_dir, self._environ, self._clock = sweep_dir, environ, clock
        self._files = LastRead()
        self._finished: dict[int, PointState] = {}
        self._missed: dict[int, set[float]] = {}
        """Number of a point without a run -> when squeue did not list its task."""
        self._read_queue = queue_reader(environ, clock=clock)
        self._ask_one: Ask = asker(environ, clock=clock)
        self._queue: Queue | None = None
        self._problem = ""
        self._tried_at, self._pause_s, self._num_over = 0.0, FRESH_S, 0
        self._has_started_runner = False

    def look(self) -> Look:
        """Read each point once; send what is left, if it is time."""
        self._problem = ""
        sweep = self._sweep()
        states = self._states(sweep)
        num_sent = self._send(sweep, states)
        is_over = not num_sent and self._is_over(sweep, states)
        return Look(
            points=sweep.points,
            states=states,
            num_sent=num_sent,
            problem=self._problem,
            is_over=is_over,
            is_cancelled=sweep.is_cancelled,
        )

    def _sweep(self) -> Sweep:
        ledger = self._sweep_dir.ledger
        return patiently(str(ledger), lambda: self._files.read(ledger, lambda: read_sweep(self._sweep_dir)))

    def _states(self, sweep: Sweep) -> dict[int, PointState]:
        # Slurm is asked before the directory is read: a task that is in neither has left the queue without making its run.
        is_array, has_runner = sweep.backend == "slurm", self._has_runner(sweep)
        waiting: set[int] = set()
        self._queue = None
        if is_array and sweep.arrays and len(self._finished) < len(sweep.points):
            self._queue = self._read_queue(max(array.at for array in sweep.arrays))
            self._problem = self._queue.problem
            jobs = list(self._queue.jobs.values())
            waiting = {number for array in sweep.arrays for number in points_in_queue(array, jobs)}
        path = self._sweep_dir.path
        there = patiently(str(path), lambda: set(os.listdir(path)))  # noqa: PTH208  names are enough
        never_sent, unanswered = set(sweep.never_sent), sweep.unanswered_numbers
        sent_at = {number: array.at for array in sweep.arrays for number in array.numbers}
        states: dict[int, PointState] = {}
        for point in sweep.points:
            number = point.number
            state = self._finished.get(number)
            if state is None and point.name in there:
                state = self._of_run(point, is_waiting=number in waiting, sent_at=sent_at.get(number, 0.0))
            if state is None and number in unanswered:
                state = PointState(word="unknown", reason="Slurm did not answer whether it accepted the point's job")
            if state is None:
                is_sent = number not in never_sent if is_array else has_runner
                state = self._without_run(number, is_sent=is_sent, is_waiting=number in waiting or not is_array)
            if state.word == "finished":
                self._finished[number] = state
            states[number] = state
        return states

    def _of_run(self, point: Point, *, is_waiting: bool, sent_at: float) -> PointState | None:
        """Return where a run stands; None where its directory is being made, and nothing has begun."""
        run, problems = self._sweep_dir.run(point), []

        def ask(job_id: str, submitted_at: float) -> QueueStatus:
            known = None if self._queue is None else self._queue.jobs.get(job_id)
            found = known or self._ask_one(job_id, submitted_at)
            problems.append(found.problem)
            return found

        status = patiently(str(run.path), lambda: read_status(run, now=self._clock(), ask=ask, files=self._files))
        if status.attempt is None and status.job_id is None:
            return None
        is_over = not status.is_alive and not (status.state == "unknown" and any(problems))
        if is_over and is_waiting and _ended_at(self._files, self._sweep_dir, point) < sent_at:
            return PointState(word="waiting", attempt=status.attempt, reason="its job was submitted again")
        return PointState(word=status.state, attempt=status.attempt, reason=_reason(status), is_over=is_over)

    def _without_run(self, number: int, *, is_sent: bool, is_waiting: bool) -> PointState:
        if not is_sent:
            return PointState(word="not submitted")
        if is_waiting:
            self._missed.pop(number, None)
            return PointState(word="waiting")
        if self._queue is None or self._queue.problem:
            return PointState(word="unknown")
        # Two answers: the first may be older than the submission, if another host with another clock has asked for it.
        missed = self._missed.setdefault(number, set())
        missed.add(self._queue.at)
        if len(missed) == 1:
            return PointState(word="waiting")
        return PointState(word="not started", reason="its job left the queue before it began", is_over=True)

    def _send(self, sweep: Sweep, states: Mapping[int, PointState]) -> int:
        """Send points that no job has, if there are some and it is time; return how many."""
        left = [number for number, state in states.items() if state.word == "not submitted"]
        num_over = sum(state.is_over for state in states.values())
        num_freed, now = num_over - self._num_over, self._clock()
        is_time = now - self._tried_at >= (FRESH_S if num_freed else self._pause_s)
        if not is_time or not (sweep.unanswered or (left and _may_start(sweep, states))):
            return 0
        if sweep.backend != "slurm":
            return self._start_runner(left)
        self._tried_at, self._num_over = now, num_over
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        try:
            sent = send_left(self._sweep_dir, self._environ, first=max(1, num_freed))
        except SlurmUnavailableError as error:
            self._problem = str(error)
            return 0
        if sent is None:  # another process sends them
            return 0
        self._problem = self._problem or sent.refusal
        if sent.jobs:
            self._pause_s = FRESH_S
        return sum(sent.jobs.values())

    def _start_runner(self, left: Sequence[int]) -> int:
        """Start the process that runs the points on this machine, once; return how many points it was given."""
        if self._has_started_runner or self._sweep_dir.runner_stop.exists():
            return 0
        self._has_started_runner = True
        try:
            local.start_runner(self._sweep_dir, left, self._environ)
        except ConfigError:  # another process has started it meanwhile
            return 0
        return len(left)

    def _is_over(self, sweep: Sweep, states: Mapping[int, PointState]) -> bool:
        if self._has_runner(sweep):
            return False
        may_send = sweep.backend == "slurm" and _may_start(sweep, states)
        return all(state.is_over or (state.word == "not submitted" and not may_send) for state in states.values())

    def _has_runner(self, sweep: Sweep) -> bool:
        """Return whether a process of this machine starts points."""
        return sweep.backend != "slurm" and local.is_running(self._sweep_dir)


def _may_start(sweep: Sweep, states: Mapping[int, PointState]) -> bool:
    num_failed = sum(
        state.word in _FAILED
        and state.is_over
        and (number not in sweep.forgiven or sweep.forgiven[number] != state.attempt)
        for number, state in states.items()
    )
    return not sweep.is_cancelled and (sweep.stop_after_failures is None or num_failed < sweep.stop_after_failures)


def _ended_at(files: LastRead, sweep_dir: SweepDir, point: Point) -> float:
    run = sweep_dir.run(point)
    newest = files.read(run.attempts, lambda: Ledger.read(run)).newest
    return 0.0 if newest is None else newest.ended_at or newest.started_at


def _reason(status: RunStatus) -> str:
    return "" if status.state == "finished" else status.reason
