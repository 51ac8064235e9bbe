"""Which points of a sweep have begun, have failed, or have a task in Slurm's queue; and who sends points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ddp_hpc.base import processes
from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import known
from ddp_hpc.cluster.slurm import states
from ddp_hpc.launch.sweep.sweep_dir import SentArray, Sweep, SweepDir, from_ranges
from ddp_hpc.run.run_dir.ledger import Attempt, Ending, Ledger
from ddp_hpc.run.run_dir.paths import RunDir

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


@contextmanager
def sending_alone(sweep_dir: SweepDir, *, patience_s: float = 0.0) -> Iterator[bool]:
    """Keep other processes from sending points, or running them here, in the `with` block; yield False where one does so already."""
    lock_fd = processes.take_lock(sweep_dir.ledger, patience_s=patience_s)
    try:
        yield lock_fd is not None
    finally:
        if lock_fd is not None:
            processes.release_lock(lock_fd)


def is_being_sent(sweep_dir: SweepDir) -> bool:
    """Return whether a process of this host sends points, or runs them here; False where the file system has no locks."""
    try:
        return processes.is_locked(sweep_dir.ledger)
    except OSError:
        return False


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
