"""Which points of a sweep on Slurm `sweep continue` may start: those that have not finished, and of which Slurm has no job."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_hpc.base.patience import is_there
from ddp_hpc.errors import UnreadableError
from ddp_hpc.run_dir.ledger import Attempt, Cause, Ending, Ledger
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.records import QueuedJob, read_queued_job
from ddp_hpc.slurm import states
from ddp_hpc.slurm.queries import QueuedEntry
from ddp_hpc.submission.backend import find_job_elsewhere
from ddp_hpc.submission.other_cluster import knows
from ddp_hpc.sweep.states import points_in_queue
from ddp_hpc.sweep.sweep_dir import Sweep, SweepDir
from ddp_hpc.watch.queue import asker
from ddp_hpc.watch.status import read_status


@dataclass(kw_only=True)
class Left:
    """Numbers of points of which Slurm has no job."""

    unbegun: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    """They have begun, and neither finished nor failed by their own records."""
    ended_by_user: list[int] = field(default_factory=list)
    """The user has cancelled or stopped them."""
    unreadable: list[int] = field(default_factory=list)
    """Their files cannot be read now, so it is not known whether they may start."""

    def startable(self, sweep: Sweep) -> list[int]:
        """Return what `continue` starts; points that were cancelled with the whole sweep are among them, until they are sent."""
        cancelled = sweep.cancelled_numbers.intersection(self.ended_by_user)
        return sorted([*self.unbegun, *self.lost, *cancelled])


def points_left(sweep_dir: SweepDir, sweep: Sweep, queued: Sequence[QueuedEntry], environ: Mapping[str, str]) -> Left:
    """Return the points of which Slurm has no job; `queued` was listed before this call, as a run records its next job before this job ends.

    Raises:
        ConfigError: where another cluster than this host's has a point's job.
        SlurmUnavailableError: where Slurm does not answer.
    """
    live = {name for entry in queued if not states.has_ended(entry.state) for name in (entry.job_id, entry.number)}
    waiting = {number for array in sweep.arrays for number in points_in_queue(array, queued)}
    left = Left()
    for point in sweep.points:
        if point.number in waiting:
            continue
        try:
            found = _place(left, sweep_dir.run(point), live, sweep.backend, environ)
        except (OSError, UnreadableError):
            found = left.unreadable
        if found is not None:
            found.append(point.number)
    return left


def failed_by_slurm(sweep_dir: SweepDir, sweep: Sweep, left: Left, environ: Mapping[str, str]) -> list[int]:
    """Return those of the lost points of whose last job Slurm says that it has failed, as `list` shows them."""
    ask, now = asker(environ, clock=time.time), time.time()
    return [
        number
        for number in left.lost
        if read_status(sweep_dir.run(sweep.points[number]), now=now, ask=ask).state in {"failed", "refused"}
    ]


def _place(left: Left, run: RunDir, live: set[str], backend: str, environ: Mapping[str, str]) -> list[int] | None:
    """Return the list that a point belongs to; None where it has finished or has a job."""
    if not is_there(run.config):
        return left.unbegun
    job, newest = read_queued_job(run), Ledger.read(run).newest
    if newest is not None and newest.is_last and newest.ending == Ending.FINISHED:
        return None
    is_of_this_slurm = job is None or knows(run, job, environ)
    if is_of_this_slurm and any(one is not None and one.job_id in live for one in (job, newest)):
        return None
    if find_job_elsewhere(run, backend, environ) is not None:
        return None
    if job is not None and (newest is None or newest.attempt < job.attempt):  # the job did not begin its attempt
        return left.lost if job.cancelled_at is None else left.ended_by_user
    return _place_ended(left, newest, job)


def _place_ended(left: Left, newest: Attempt | None, job: QueuedJob | None) -> list[int]:
    """Return the list of a point whose newest job has begun, and is gone."""
    if newest is None or not newest.is_last:
        return left.lost if job is None or job.cancelled_at is None else left.ended_by_user
    if newest.ending in {Ending.FAILED, Ending.REFUSED}:
        return left.failed
    is_by_user = newest.ending == Ending.CANCELLED or newest.cause == Cause.STOP_ASKED
    return left.ended_by_user if is_by_user else left.lost
