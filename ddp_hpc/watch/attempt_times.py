"""Where the time of each attempt went: queued, starting, training, saving, lost, or not known. Pure, but for `read_times`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

from ddp_hpc.run.run_dir.ledger import Attempt, Ending, Ledger, Next
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import Tail
from ddp_hpc.run.run_dir.records import Progress, QueuedJob, read_progress, read_queued_job
from ddp_hpc.run.run_dir.timeline import Mark, read_marks
from ddp_hpc.watch.report.series import parse_lines

CHECKPOINT = "checkpoint"
"""The phase of the loop in which it waits for a save."""
KINDS = ("queued", "starting", "training", "saving", "lost", "unknown")
_SAVED_ENDS = frozenset({Ending.FINISHED, Ending.STOPPED})
"""Attempts that end so have committed all their steps."""
_MOST_BYTES = 256 << 10
"""Of each file of logged steps that are read."""
_QUEUED_CONTINUATIONS = frozenset({Next.REQUEUE, Next.SUCCESSOR, Next.SLURM})


@dataclass(frozen=True, kw_only=True)
class AttemptTime:
    """The times of one attempt, in seconds since the epoch. The seconds of all kinds, without `queued`, add up to its length."""

    attempt: Attempt
    queued_at: float | None
    """When its job was put into the queue; None where it was not, or where that is not known."""
    trained_from: float | None
    """When its training state was there; None if that never was, or is not known."""
    useful_until: float | None
    """When it reached the newest step that a later attempt did not repeat; None before any."""
    ended_at: float
    """For an attempt that goes on: now. For one that was killed and recorded no end: its last sign of life."""
    is_open: bool
    first_step: int
    reached_step: int
    """The newest step that is known of it."""
    kept_step: int
    """The newest step that no later attempt repeats; `first_step` where all are repeated."""
    seconds: Mapping[str, float]
    """Kind -> seconds."""
    num_nodes: int
    num_gpus: int

    @property
    def length_s(self) -> float:
        return self.ended_at - self.attempt.started_at

    @property
    def is_whole(self) -> bool:
        """Whether it has ended and lost nothing, and its marks say so up to its last step: then its logged steps say nothing new."""
        is_known = self.kept_step == self.reached_step >= (self.attempt.last_step or 0)
        return not self.is_open and self.attempt.ending in _SAVED_ENDS and is_known

    @property
    def is_failure(self) -> bool:
        """Whether it ended otherwise than by its own commit."""
        return not self.is_open and self.attempt.ending not in _SAVED_ENDS and self.attempt.ending != Ending.CANCELLED


@dataclass(frozen=True)
class _Points:
    """What one attempt has noted, and the time and step of lines that it has logged."""

    marks: Sequence[Mark]
    logged: Sequence[tuple[float, int]] = ()

    @property
    def begin(self) -> Mark | None:
        return next((one for one in self.marks if one.kind == "begin"), None)

    @cached_property
    def steps(self) -> list[tuple[float, float]]:
        """Time and step, both growing. A save is noted when it is committed; its step was made before it began."""
        made = [(one.at - (one.seconds or 0.0) if one.kind == "save" else one.at, one.step) for one in self.marks]
        found: list[tuple[float, float]] = []
        for at, step in sorted([*made, *self.logged]):
            if not found or step >= found[-1][1]:
                found.append((at, float(step)))
        return found

    @property
    def stalls(self) -> list[tuple[float, float]]:
        """Time, and for how many seconds the loop has waited for saves until then."""
        begin = [] if self.begin is None else [(self.begin.at, 0.0)]
        return begin + [(one.at, one.phases.get(CHECKPOINT, 0.0)) for one in self.marks if one.kind == "phases"]


def read_times(run: RunDir, *, now: float, is_alive: bool, marks: Sequence[Mark] | None = None) -> list[AttemptTime]:
    """Return the times of a run's attempts. A caller that has read the marks passes them.

    Raises:
        OSError: if the file system does not answer.
    """
    times_with = partial(
        attempt_times,
        Ledger.read(run).attempts,
        read_marks(run) if marks is None else marks,
        progress=read_progress(run),
        queued=read_queued_job(run),
        now=now if is_alive else None,
    )
    times = times_with()
    return times if all(one.is_whole for one in times) else times_with(logged=_logged_steps(run))


def _logged_steps(run: RunDir) -> list[tuple[float, int]]:
    """Return time and step of logged steps, the newest and some before them: a worker that is killed notes no end, but has logged."""
    found = []
    for path in (run.superseded_metrics, run.metrics):
        with suppress(OSError):  # then they prove nothing
            lines = (line for line, _ in parse_lines(Tail(path, most_bytes=_MOST_BYTES).new_raw_lines()))
            found += [(one.at, one.step) for one in lines if one.kind == "train" and one.at is not None]
    return found


def attempt_times(  # noqa: PLR0913  one for each record
    attempts: Sequence[Attempt],
    marks: Sequence[Mark],
    *,
    progress: Progress | None,
    queued: QueuedJob | None,
    now: float | None,
    logged: Sequence[tuple[float, int]] = (),
) -> list[AttemptTime]:
    """Return the times of attempts, oldest first; without `now`, of a run that is not alive.

    `logged`: time and step of logged steps, of any attempt, in any order.
    """
    by_attempt: dict[int, list[Mark]] = defaultdict(list)
    for mark in marks:
        by_attempt[mark.attempt].append(mark)
    points = {one.attempt: _Points(sorted(by_attempt[one.attempt], key=lambda mark: mark.at)) for one in attempts}
    points = _with_logged(points, logged)
    # A recipe's attempt without marks has not begun to train, if other attempts have marks, or if no step was ever made.
    knows_all = bool(marks) or progress is None
    gpus = max((mark.num_gpus or 0 for mark in marks), default=0)
    kept = _kept_steps(attempts, points, is_alive=now is not None)
    found = []
    for number, one in enumerate(attempts):
        is_open = now is not None and one.ending is None and one is attempts[-1]
        ended_at = _ended_at(one, points[one.attempt], progress, now if is_open else None)
        queued_at = queued.at if queued is not None and queued.attempt == one.attempt else None
        if one.queued_at is not None or (number and attempts[number - 1].next in _QUEUED_CONTINUATIONS):
            queued_at = attempts[number - 1].ended_at if one.queued_at is None else one.queued_at
        time = _time_of(one, points[one.attempt], kept[number], ended_at=ended_at, queued_at=queued_at, is_open=is_open)
        seconds = _divide_time(time, points[one.attempt], knows_all=knows_all)
        found.append(replace(time, seconds=seconds, num_gpus=time.num_gpus or gpus))
    return found


def _with_logged(points: Mapping[int, _Points], logged: Sequence[tuple[float, int]]) -> dict[int, _Points]:
    """Give each logged step to the attempt that trained at that time: rank zero has noted its beginning by the same clock."""
    begun = sorted((begin.at, number) for number, one in points.items() if (begin := one.begin) is not None)
    found: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for at, step in logged:
        if before := bisect_right(begun, (at, math.inf)):
            found[begun[before - 1][1]].append((at, step))
    return {number: replace(one, logged=found[number]) for number, one in points.items()}


def _ended_at(one: Attempt, points: _Points, progress: Progress | None, now: float | None) -> float:
    """Return when an attempt ended; of one that was killed, the last sign of it."""
    known = one.ended_at if now is None else now
    if known is not None:
        return max(one.started_at, known)
    of_progress = progress.at if progress is not None and progress.attempt == one.attempt else 0.0
    return max([one.started_at, of_progress, *(mark.at for mark in points.marks), *(at for at, _ in points.logged)])


def _kept_steps(attempts: Sequence[Attempt], points: Mapping[int, _Points], *, is_alive: bool) -> list[int | None]:
    """Return the newest step of each of these attempts that no later one repeats; None where all are kept."""
    found: list[int | None] = []
    # The lowest step at which a later attempt has begun, and the highest at which one was to begin.
    begun: int | None = None
    first: int | None = None
    for one in reversed(attempts):
        saved = [mark.step for mark in points[one.attempt].marks if mark.kind == "save"]
        if begun is not None:
            found.append(begun)
        elif first is not None:
            found.append(max([*saved, first]))
        else:
            is_whole = one.ending in _SAVED_ENDS or (is_alive and one.ending is None)
            found.append(None if is_whole else max([*saved, one.last_step or 0, one.first_step]))
        begin = points[one.attempt].begin
        if begin is not None:
            begun = begin.step if begun is None else min(begun, begin.step)
        first = one.first_step if first is None else max(first, one.first_step)
    return found[::-1]


def _time_of(  # noqa: PLR0913  what the loop over the attempts knows
    one: Attempt, points: _Points, kept: int | None, *, ended_at: float, queued_at: float | None, is_open: bool
) -> AttemptTime:
    """Return the times of one attempt, but how they divide."""
    begin, steps = points.begin, points.steps
    first = one.first_step if begin is None else begin.step
    reached = max([first, *(int(step) for _, step in steps)])
    kept = reached if kept is None else max(first, min(kept, reached))
    is_whole = kept >= reached and (one.ending in _SAVED_ENDS or one.ending is None)
    until = None if begin is None else ended_at
    if begin is not None and not is_whole:
        until = max(begin.at, _interpolate([(step, at) for at, step in steps], kept))
    return AttemptTime(
        attempt=one,
        queued_at=queued_at,
        trained_from=None if begin is None else begin.at,
        useful_until=until,
        ended_at=ended_at,
        is_open=is_open,
        first_step=first,
        reached_step=reached,
        kept_step=kept,
        seconds={},
        num_nodes=len(one.nodes) or 1,
        num_gpus=0 if begin is None else begin.num_gpus or 0,
    )


def _divide_time(time: AttemptTime, points: _Points, *, knows_all: bool) -> dict[str, float]:
    """Divide the length of an attempt, and tell how long it was queued."""
    seconds = dict.fromkeys(KINDS, 0.0)
    seconds["queued"] = max(0.0, time.attempt.started_at - time.queued_at) if time.queued_at else 0.0
    if time.trained_from is None or time.useful_until is None:
        is_lost = not time.is_open and time.attempt.ending not in _SAVED_ENDS
        seconds["unknown" if not knows_all else "lost" if is_lost else "starting"] = time.length_s
        return seconds
    seconds["starting"] = min(time.length_s, max(0.0, time.trained_from - time.attempt.started_at))
    useful_s = max(0.0, time.useful_until - time.trained_from)
    seconds["saving"] = min(useful_s, _interpolate(points.stalls, time.useful_until))
    seconds["training"] = useful_s - seconds["saving"]
    seconds["lost"] = max(0.0, time.length_s - seconds["starting"] - useful_s)
    return seconds


def _interpolate(points: Sequence[tuple[float, float]], when: float) -> float:
    """Return the value of a line through these points; before the first, and after the last, theirs."""
    index = bisect_right([at for at, _ in points], when)
    if index in {0, len(points)}:
        return points[min(index, len(points) - 1)][1] if points else 0.0
    (at, here), (then, there) = points[index - 1 : index + 1]
    return here + (there - here) * (when - at) / (then - at)
