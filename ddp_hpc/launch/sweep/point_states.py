"""Where each point of a sweep stands: what `list` shows, what `follow` prints, and what `continue` may start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import await_answer
from ddp_hpc.cluster.slurm import states
from ddp_hpc.launch.sweep.points import Point
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, is_being_sent, points_in_queue, read_sweep
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ending, Ledger
from ddp_hpc.run.run_dir.poll_files import LOOK_INTERVAL_S, ReadCache
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job
from ddp_hpc.watch.queue import AskSlurm, Queue, QueueStatus, asker, queue_reader
from ddp_hpc.watch.status import RunStatus, State, read_status

READS_PER_S = 50
"""At most so many runs are read in a second, so that one follower of a large sweep does not load the file system."""
PointWord = State | Literal["not submitted"]
"""What `status` says of the point's run; or: it has none, and no job will make one."""
UnfinishedState = Literal["not begun", "lost", "failed", "ended by the user", "unreadable"]
"""What a point is that has no job and has not finished. `lost`: it has begun, and neither finished nor failed by its own records;
`unreadable`: it is not known whether it may start."""


@dataclass(frozen=True, kw_only=True)
class PointState:
    """Where one point stands."""

    word: PointWord
    status: RunStatus | None = None
    """Of its run; None where it has none, or its files cannot be read."""
    reason: str = ""
    is_over: bool = False
    """Whether nothing works on it, and nothing will unless the user says so."""
    left: UnfinishedState | None = None
    """None where it has finished or has a job, or that is not known."""

    @property
    def attempt(self) -> int | None:
        """Of its run, counted from 0; None before the first."""
        return None if self.status is None else self.status.attempt


@dataclass(frozen=True, kw_only=True)
class _SharedFacts:
    """What is the same for all points at one moment."""

    sweep: Sweep
    queue: Queue
    there: set[str]
    """The names in the sweep's directory."""
    is_being_sent: bool
    waiting: set[int]
    """Numbers of the points that have a task in the queue."""
    never: Mapping[int, str]
    """Numbers of those whose task will not start, and why."""
    sent_at: Mapping[int, float]
    """Number of a point -> when its newest array was accepted."""


class PointReader:
    """Reads where the points stand; read again, files that are unchanged and runs that have finished are not read."""

    def __init__(self, ask: AskSlurm, *, clock: Callable[[], float] = time.time) -> None:
        """`ask` asks Slurm about a job that is not in the queue."""
        self._ask, self._clock = ask, clock
        self._files = ReadCache()
        self.finished: dict[int, PointState] = {}

    def read(self, sweep: Sweep, queue: Queue, *, is_being_sent: bool = False) -> dict[int, PointState]:
        """Return where each point stands, by its number.

        `queue` was read before this call, as a task that is in neither the queue nor the directory has left the queue without making its run.
        `is_being_sent`: another process sends points, or runs them on this machine.
        """
        path, jobs = sweep.dir.path, list(queue.jobs.values())
        never = [(one, why) for one in jobs if (why := states.why_never(one.reason))]
        seen = _SharedFacts(
            sweep=sweep,
            queue=queue,
            is_being_sent=is_being_sent,
            there=await_answer(str(path), lambda: set(os.listdir(path))),  # noqa: PTH208  names are enough
            waiting={number for array in sweep.arrays for number in points_in_queue(array, jobs)},
            never={n: why for one, why in never for array in sweep.arrays for n in points_in_queue(array, [one])},
            sent_at={number: array.at for array in sweep.arrays for number in array.numbers},
        )
        found = {point.number: self.finished.get(point.number) or self._state(point, seen) for point in sweep.points}
        self.finished = {number: state for number, state in found.items() if state.word == "finished"}
        return found

    def _state(self, point: Point, seen: _SharedFacts) -> PointState:
        state = None
        if point.name in seen.there:
            try:
                state = self._state_of_run(point, seen)
            except (OSError, UnreadableError):  # its file system does not answer; the others are read all the same
                return PointState(word="unknown", reason="its files cannot be read now", left="unreadable")
        state, why = state or _state_without_run(point.number, seen), seen.never.get(point.number)
        return replace(state, reason=why, is_over=True) if why and state.word == "waiting" else state

    def _state_of_run(self, point: Point, seen: _SharedFacts) -> PointState | None:
        """Return where a run stands; None where its directory is being made, and nothing has begun."""
        run, problems = seen.sweep.dir.run(point), []

        def ask(job_id: str, submitted_at: float) -> QueueStatus:
            found = seen.queue.jobs.get(job_id) or self._ask(job_id, submitted_at)
            problems.append(found.problem)
            return found

        status = read_status(run, now=self._clock(), ask=ask, files=self._files)
        if status.attempt is None and status.job_id is None:
            return None
        newest = self._files.read(run.attempts, lambda: Ledger.read(run)).newest
        job = self._files.read(run.submission, lambda: read_queued_job(run))
        is_over = not status.is_alive and not (status.state == "unknown" and any(problems))
        reason = "" if status.state == "finished" else status.reason
        state = PointState(word=status.state, status=status, reason=reason, is_over=is_over)
        if point.number in seen.waiting:
            ended_at = 0.0 if newest is None else newest.ended_at or newest.started_at
            if not is_over or ended_at >= seen.sent_at[point.number]:
                return state
            return replace(state, word="waiting", reason="its job was submitted again", is_over=False)
        if seen.sweep.backend == "slurm":
            found = [seen.queue.jobs.get(one.job_id) for one in (job, newest) if one is not None]
            knows = bool(seen.queue.problem) or any(one is not None and not one.has_ended for one in found)
        else:
            knows = status.is_alive or status.state == "unknown"  # unknown: it may run on another host
        return state if knows else replace(state, left=_unfinished_state(newest, job))


def _state_without_run(number: int, seen: _SharedFacts) -> PointState:
    if number in seen.sweep.unanswered_numbers:
        reason = "Slurm did not answer whether it accepted the point's job"
        return PointState(word="unknown", reason=reason, is_over=not seen.is_being_sent)
    if number in seen.waiting or (seen.sweep.backend != "slurm" and seen.is_being_sent):
        return PointState(word="waiting")
    if number not in seen.sent_at:
        return PointState(word="not submitted", is_over=not seen.is_being_sent, left="not begun")
    if seen.queue.problem:
        return PointState(word="unknown")
    reason = "its job left the queue before it began"
    return PointState(word="not submitted", reason=reason, is_over=True, left="not begun")


def _unfinished_state(newest: Attempt | None, job: QueuedJob | None) -> UnfinishedState | None:
    """Return what a point without a job is, by the records of its run."""
    if newest is not None and newest.is_last and newest.ending == Ending.FINISHED:
        return None
    is_cancelled = job is not None and job.cancelled_at is not None
    if newest is None or not newest.is_last or (job is not None and newest.attempt < job.attempt):
        return "ended by the user" if is_cancelled else "lost"
    if newest.ending in {Ending.FAILED, Ending.REFUSED}:
        return "failed"
    # A job that Slurm has cancelled, and `ddp-hpc cancel` has not, was ended by `scancel`: the point is to go on.
    is_cancelled = newest.ending == Ending.CANCELLED and (job is None or is_cancelled)
    is_by_user = is_cancelled or newest.cause == Cause.STOP_ASKED
    return "ended by the user" if is_by_user else "lost"


@dataclass(frozen=True, kw_only=True)
class SweepStatus:
    """All points at one moment."""

    sweep: Sweep
    states: Mapping[int, PointState]
    """By the points' numbers."""
    problem: str = ""
    """Why something is not known."""
    is_over: bool = False
    """Whether nothing waits or runs."""


def follow_points(
    sweep_dir: SweepDir,
    environ: Mapping[str, str],
    *,
    clock: Callable[[], float] = time.time,
    pause: Callable[[float], object] = time.sleep,
) -> Iterator[SweepStatus]:
    """Yield one look after another; the last one is of a sweep in which nothing waits or runs."""
    files, reader = ReadCache(), PointReader(asker(environ, clock=clock), clock=clock)
    read_queue = queue_reader(environ, clock=clock)
    missed: dict[int, float] = {}
    """Number of a point without a run -> when squeue first did not list its task."""
    while True:
        began = clock()
        is_sending = is_being_sent(sweep_dir)  # first: what is sent meanwhile is not over
        sweep = await_answer(str(sweep_dir.ledger), lambda: files.read(sweep_dir.ledger, lambda: read_sweep(sweep_dir)))
        queue = Queue()
        if sweep.arrays and len(reader.finished) < len(sweep.points):
            queue = read_queue(max(array.at for array in sweep.arrays))
        states = reader.read(sweep, queue, is_being_sent=is_sending)
        for number, state in states.items():
            if state.word == "waiting":
                missed.pop(number, None)
            # Two answers: the first may be older than the submission, if another host with another clock has asked for it.
            elif state.left == "not begun" and state.reason and missed.setdefault(number, queue.at) == queue.at:
                states[number] = PointState(word="waiting")
        is_over = not is_sending and all(state.is_over for state in states.values())
        yield SweepStatus(sweep=sweep, states=states, problem=queue.problem, is_over=is_over)
        if is_over:
            return
        num_read = sum(not state.is_over and state.attempt is not None for state in states.values())
        pause(max(LOOK_INTERVAL_S, num_read / READS_PER_S, clock() - began))
