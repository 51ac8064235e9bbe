"""Which points of a sweep wait, run, have failed, or are not submitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

from ddp_hpc.base.patience import known
from ddp_hpc.errors import SlurmUnavailableError, UnreadableError
from ddp_hpc.run_dir.ledger import Attempt, Ending, Ledger
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.slurm import client, states
from ddp_hpc.sweep.sweep_dir import SentArray, Sweep, SweepDir, from_ranges

Unbegun = Literal["not submitted", "waiting", "unknown"]
"""What a point without a run is: no job has it; a task of an array waits; or Slurm does not answer."""
_FAILED = frozenset({Ending.FAILED, Ending.REFUSED})


def has_begun(run: RunDir) -> bool:
    """Return whether a task, or this machine, has made the point's run."""
    return known(run.config, run.config.exists, unknown=True)


def has_ended(run: RunDir) -> bool:
    """Return whether the run's newest attempt is known to have ended, and no other follows; a run without an attempt has not."""
    newest = _newest(run)
    return newest is not None and newest.is_last


def _newest(run: RunDir) -> Attempt | None:
    try:
        return Ledger.read(run).newest
    except (OSError, UnreadableError):  # of one point; the others are not to wait for its file system
        return None


def num_failed(sweep_dir: SweepDir, sweep: Sweep) -> int:
    """Return how many points have failed since the user has continued the sweep for the last time."""
    return sum(sweep.forgiven.get(number) != attempt for number, attempt in failed_attempts(sweep_dir, sweep).items())


def failed_attempts(sweep_dir: SweepDir, sweep: Sweep) -> dict[int, int]:
    """Return the points that have failed, and the attempt that has."""
    newest = {point.number: _newest(sweep_dir.run(point)) for point in sweep.points}
    return {
        number: one.attempt
        for number, one in newest.items()
        if one is not None and one.is_last and one.ending in _FAILED
    }


def failed_points(sweep_dir: SweepDir, sweep: Sweep) -> list[int]:
    """Return the numbers of the points that have failed."""
    return list(failed_attempts(sweep_dir, sweep))


def cancelled_points(sweep_dir: SweepDir, sweep: Sweep) -> list[int]:
    """Return the numbers of the points whose newest attempt was cancelled."""
    newest = {point.number: _newest(sweep_dir.run(point)) for point in sweep.points}
    return [number for number, one in newest.items() if one is not None and one.ending == Ending.CANCELLED]


def unbegun_points(sweep_dir: SweepDir, sweep: Sweep, environ: Mapping[str, str]) -> dict[int, Unbegun]:
    """Return what the points are that have no run yet, by their numbers."""
    numbers = [point.number for point in sweep.points if not has_begun(sweep_dir.run(point))]
    unknown = sweep.unanswered_numbers
    sent = {number for array in sweep.arrays for number in array.numbers} | unknown
    if sent.isdisjoint(numbers) or sweep.backend != "slurm":
        return dict.fromkeys(numbers, "not submitted")
    try:
        queued = client.queue(client.user_name(), environ)
    except SlurmUnavailableError:
        return {number: "unknown" if number in sent else "not submitted" for number in numbers}
    waiting = {number for array in sweep.arrays for number in points_in_queue(array, queued)}
    return {
        number: "waiting" if number in waiting else "unknown" if number in unknown else "not submitted"
        for number in numbers
    }


class Listed(Protocol):
    """A job as squeue lists it."""

    @property
    def job_id(self) -> str: ...

    @property
    def state(self) -> str | None: ...


def points_in_queue(array: SentArray, queued: Iterable[Listed]) -> set[int]:
    """Return which points of an array have a task that waits or runs."""
    tasks: set[int] = set()
    for entry in queued:
        job, _, task = entry.job_id.partition("_")
        if job != array.job_id or entry.state is None or states.has_ended(entry.state):
            continue
        listed = task.strip("[]").partition("%")[0]
        try:
            tasks |= set(from_ranges(listed))
        except ValueError:  # a list that squeue has cut off, or one it writes in another way: any of them may wait
            return set(array.numbers)
    return {number for number in array.numbers if number - array.offset in tasks}
