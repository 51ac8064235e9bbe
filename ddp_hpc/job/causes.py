"""Why an attempt ended, from what its processes, its directory and Slurm say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_hpc import exit_codes
from ddp_hpc.ledger import Cause
from ddp_hpc.requeue import SLURMS_SLOP_S
from ddp_hpc.slurm import states
from ddp_hpc.slurm.queries import JobRecord


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known when the workers are gone."""

    code: int
    """What their exit codes mean together."""
    owns_run: bool = True
    stop_request: Literal["end", "requeue"] | None = None
    """What the user asked for."""
    is_out_of_time: bool = False
    """Whether the deadline clock told them."""
    is_wedged: bool = False
    was_suspended: bool = False
    """Whether the whole job, the supervisor too, stood still for longer than the workers may."""
    has_stacks: bool = False
    """Whether a watchdog has bitten."""
    lost_nodes: Sequence[str] = ()
    """Nodes that Slurm takes for lost, or that did not answer."""
    now: float = 0.0
    lead_s: float = 0.0
    restart: int = 0
    """How often Slurm had started this job again when the attempt began."""
    job: JobRecord | None = None
    """The job, as Slurm knows it now; None without Slurm, or where it does not answer."""
    accounted_as: str = ""
    """The state in which accounting saw this start of the job end; empty where it does not say, or was not asked."""

    @property
    def is_requeued_by_slurm(self) -> bool:
        """Whether the job is in the queue again, by nothing that we did."""
        return self.job is not None and (self.job.restarts or 0) > self.restart

    @property
    def is_preempted(self) -> bool:
        """Whether Slurm has begun to take the job's nodes away."""
        return self.job is not None and self.job.preempted_at is not None

    @property
    def is_for_accounting(self) -> bool:
        """Whether accounting alone knows why the job ends: scontrol says that it is back, or ends, whatever the reason."""
        return self.is_requeued_by_slurm or (self.is_preempted and is_ending(self.job))


BY_STATE: Mapping[states.JobState, Cause] = {
    "preempted": Cause.PREEMPTED,
    "node_fail": Cause.NODE_FAILED,
    "timeout": Cause.TIME_LIMIT,
    "requeued": Cause.REQUEUE_ASKED,
    "cancelled": Cause.CANCELLED,
}
"""The state in which Slurm saw a start of a job end -> why the attempt in it ended."""

CAUSES_BY_REASON: Mapping[str, Cause] = {"TimeLimit": Cause.TIME_LIMIT, "NodeDown": Cause.NODE_FAILED}
"""Why Slurm ends a job -> why the attempt in it ended; of one that its user cancels it gives no reason."""


def cause_of(evidence: Evidence) -> Cause:
    """Return why an attempt ended; Slurm's word on its own doings goes before what the workers made of them."""
    return next(cause for cause in (read(evidence) for read in _READINGS) if cause is not None)


def _by_exit_code(evidence: Evidence) -> Cause | None:
    if evidence.code == exit_codes.FINISHED:
        return Cause.FINISHED
    if evidence.code == exit_codes.DIVERGED and evidence.owns_run:
        return Cause.DIVERGED  # all ranks have said so, whatever Slurm does to the job meanwhile
    return Cause.FENCED if evidence.code == exit_codes.FENCED or not evidence.owns_run else None


def _by_slurm(evidence: Evidence) -> Cause | None:
    """Return what Slurm is doing to the job, if it is ending it.

    A job that ends is COMPLETING to scontrol, whatever the reason. Where it comes back, its count of restarts has
    risen; else only a time limit leaves a reason, and only a preemption its time (measured: 22.05, 24.11). That a lost
    node leaves one, too, is from Slurm's source (job_mgr.c); on 22.05 such a job was seen not to be taken for cancelled.
    """
    job = evidence.job
    if job is None:
        return None
    if evidence.is_requeued_by_slurm:
        cause = BY_STATE.get(states.parse_state(evidence.accounted_as))
        if cause is None or cause == Cause.CANCELLED:  # a job that is back was not cancelled
            return Cause.NODE_FAILED if evidence.lost_nodes else Cause.REQUEUE_ASKED
        return cause
    if not is_ending(job):
        word = states.parse_state(job.state)
        return None if word == "requeued" else BY_STATE.get(word)  # it waits again, and only its count says so
    if is_cancelled(job, evidence.accounted_as):
        return Cause.CANCELLED
    return CAUSES_BY_REASON.get(job.reason, Cause.PREEMPTED)


def is_ending(job: JobRecord | None) -> bool:
    """Tell whether a job is being ended, or cancelled."""
    return job is not None and states.parse_state(job.state) in {"ending", "cancelled"}


def is_cancelled(job: JobRecord, accounted_as: str) -> bool:
    """Tell whether the user has cancelled a job that did not come back; in the grace of a preemption, only accounting knows."""
    if not is_ending(job) or job.reason in CAUSES_BY_REASON:
        return False
    return job.preempted_at is None or states.parse_state(accounted_as) == "cancelled"


def _by_request(evidence: Evidence) -> Cause | None:
    """Return why they were told to leave, if they were."""
    if evidence.code == exit_codes.REFUSED:
        return Cause.REFUSED
    if evidence.stop_request is not None:
        return Cause.STOP_ASKED if evidence.stop_request == "end" else Cause.REQUEUE_ASKED
    if evidence.is_preempted:
        return Cause.PREEMPTED
    if evidence.is_out_of_time:
        return Cause.TIME_LIMIT
    return None


def _by_leave(evidence: Evidence) -> Cause | None:
    """Return why they left though nobody is known to have told them: a signal that Slurm sent to the steps alone."""
    if evidence.code not in (exit_codes.STOPPED, exit_codes.UNHEARD):
        return None
    if _is_near_limit(evidence):
        return Cause.TIME_LIMIT
    return Cause.REQUEUE_ASKED if evidence.code == exit_codes.STOPPED else Cause.UNEXPLAINED


def _by_death(evidence: Evidence) -> Cause | None:
    if evidence.has_stacks or evidence.is_wedged:
        return Cause.SUSPENDED if evidence.was_suspended else Cause.HANG
    return Cause.NODE_FAILED if evidence.lost_nodes else Cause.WORKER_CRASHED


_READINGS = (_by_exit_code, _by_slurm, _by_request, _by_leave, _by_death)


def _is_near_limit(evidence: Evidence) -> bool:
    if evidence.is_out_of_time:
        return True
    ends_at = None if evidence.job is None else evidence.job.ends_at
    return ends_at is not None and evidence.now >= ends_at - evidence.lead_s - 2 * SLURMS_SLOP_S
