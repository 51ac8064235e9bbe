"""Why an attempt ended, from what its processes, its directory and Slurm say. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ddp_hpc.base import exit_codes
from ddp_hpc.cluster.slurm import states
from ddp_hpc.cluster.slurm.queries import JobRecord
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.run.requeue import SLURM_SIGNAL_EARLY_S
from ddp_hpc.run.run_dir.differences import Difference
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ledger


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known when all workers have exited: from the files of the run, each read once, and from Slurm."""

    outcome: Outcome
    ledger: Ledger = field(default_factory=Ledger)
    attempts: Sequence[Attempt] = ()
    """Those of the user's newest submission."""
    failures: Sequence[WorkerFailure] = ()
    """Of this attempt, the first cause first."""
    difference: Difference | None = None
    """What this attempt's ranks had that differed; None where none was found."""
    differs_as: int | None = None
    """The earlier attempt in which each rank had the same values after the same step."""
    owns_run: bool = True
    stop_request: Literal["end", "requeue"] | None = None
    """What the user asked for."""
    has_script_asked: bool = False
    """Whether a script asked for another attempt, though neither it nor the supervisor had been asked to stop."""
    has_trained: bool = False
    """Whether an attempt with the same input has trained: then that input is valid."""
    has_stacks: bool = False
    """Whether a watchdog timed out and dumped the stacks."""
    lost_nodes: Sequence[str] = ()
    """Nodes that are down by Slurm's records, or that did not answer."""
    now: float = 0.0
    lead_s: float = 0.0
    restart: int = 0
    """How often Slurm had started this job again when the attempt began."""
    job: JobRecord | None = None
    """The job, as Slurm knows it now; None without Slurm, or where it does not answer."""
    accounted_as: str = ""
    """Final state of this start of the job by accounting (sacct); empty where that is not known, or was not asked."""

    @property
    def is_requeued_by_slurm(self) -> bool:
        """Whether Slurm has requeued the job without an order of this program."""
        return self.job is not None and (self.job.restarts or 0) > self.restart

    @property
    def is_preempted(self) -> bool:
        """Whether Slurm has begun to preempt the job."""
        return self.job is not None and self.job.preempted_at is not None

    @property
    def is_accounting_needed(self) -> bool:
        """Whether only accounting knows why the job ends: scontrol shows PENDING or COMPLETING, whatever the reason."""
        return self.is_requeued_by_slurm or (self.is_preempted and is_job_ending(self.job))


CAUSES_BY_STATE: Mapping[states.JobState, Cause] = {
    "preempted": Cause.PREEMPTED,
    "node_fail": Cause.NODE_FAILED,
    "timeout": Cause.TIME_LIMIT,
    "requeued": Cause.REQUEUE_ASKED,
    "cancelled": Cause.CANCELLED,
}
"""Final state of a start of a job -> why the attempt in it ended."""

CAUSES_BY_REASON: Mapping[str, Cause] = {"TimeLimit": Cause.TIME_LIMIT, "NodeDown": Cause.NODE_FAILED}
"""Why Slurm ends a job -> why the attempt in it ended; a cancelled job has no reason."""


def cause_of(evidence: Evidence) -> Cause:
    """Return why an attempt ended; what Slurm did to the job counts before the exit codes that followed from it."""
    return next(cause for cause in (read(evidence) for read in _CAUSE_FINDERS) if cause is not None)


def _cause_by_exit_code(evidence: Evidence) -> Cause | None:
    if evidence.outcome.code == exit_codes.FINISHED:
        return Cause.FINISHED
    if evidence.outcome.code == exit_codes.DIVERGED and evidence.owns_run:
        return Cause.DIVERGED  # all ranks agreed on it, whatever Slurm does to the job meanwhile
    if evidence.outcome.code == exit_codes.RANKS_DIFFER and evidence.owns_run:
        return Cause.RANKS_DIFFER
    return Cause.FENCED if evidence.outcome.code == exit_codes.FENCED or not evidence.owns_run else None


def _cause_by_slurm(evidence: Evidence) -> Cause | None:
    """Return why Slurm is ending the job, if it is."""
    # While a job ends, scontrol shows COMPLETING and hides the final state behind it (squeue(1), JOB STATE CODES,
    # https://slurm.schedmd.com/squeue.html). Three fields still tell the reason: a job that was requeued has a higher
    # Restarts; one at its time limit has a Reason; one that is preempted has a PreemptTime (measured: 22.05, 24.11). A lost
    # node leaves a Reason, too, by Slurm's source (job_mgr.c); on 22.05 such a job was not taken for cancelled.
    job = evidence.job
    if job is None:
        return None
    if evidence.is_requeued_by_slurm:
        cause = CAUSES_BY_STATE.get(states.parse_state(evidence.accounted_as))
        if cause is None or cause == Cause.CANCELLED:  # a job that is back was not cancelled
            return Cause.NODE_FAILED if evidence.lost_nodes else Cause.REQUEUE_ASKED
        return cause
    if not is_job_ending(job):
        word = states.parse_state(job.state)
        return None if word == "requeued" else CAUSES_BY_STATE.get(word)  # it is queued again, which Restarts says
    if is_job_cancelled(job, evidence.accounted_as):
        return Cause.CANCELLED
    return CAUSES_BY_REASON.get(job.reason, Cause.PREEMPTED)


def is_job_ending(job: JobRecord | None) -> bool:
    """Tell whether Slurm is ending the job, or has cancelled it."""
    return job is not None and states.parse_state(job.state) in {"ending", "cancelled"}


def is_job_cancelled(job: JobRecord, accounted_as: str) -> bool:
    """Tell whether a job that was not requeued was cancelled; in a preemption's GraceTime, only accounting knows."""
    if not is_job_ending(job) or job.reason in CAUSES_BY_REASON:
        return False
    return job.preempted_at is None or states.parse_state(accounted_as) == "cancelled"


def _cause_if_stop_asked(evidence: Evidence) -> Cause | None:
    """Return why the workers were asked to stop, if they were."""
    if evidence.outcome.code == exit_codes.REFUSED:
        return Cause.WORKER_CRASHED if evidence.has_trained else Cause.REFUSED
    if evidence.stop_request is not None:
        return Cause.STOP_ASKED if evidence.stop_request == "end" else Cause.REQUEUE_ASKED
    if evidence.is_preempted:
        return Cause.PREEMPTED
    if evidence.outcome.is_out_of_time:
        return Cause.TIME_LIMIT
    return Cause.PREFLIGHT if evidence.outcome.has_failed_preflight else None


def _cause_by_stop_code(evidence: Evidence) -> Cause | None:
    """Return why the workers stopped though the supervisor knows of no request: Slurm signalled the job steps only."""
    if evidence.outcome.code not in (exit_codes.STOPPED, exit_codes.STOPPED_BEFORE_START):
        return None
    # Slurm may send the signal a minute earlier than asked (sbatch(1), `--signal`, https://slurm.schedmd.com/sbatch.html).
    ends_at = None if evidence.job is None else evidence.job.ends_at
    is_near_limit = ends_at is not None and evidence.now >= ends_at - evidence.lead_s - 2 * SLURM_SIGNAL_EARLY_S
    if evidence.outcome.is_out_of_time or is_near_limit:
        return Cause.TIME_LIMIT
    if evidence.has_script_asked:
        return Cause.SCRIPT_ASKED
    return Cause.REQUEUE_ASKED if evidence.outcome.code == exit_codes.STOPPED else Cause.UNEXPLAINED


def _cause_of_failure(evidence: Evidence) -> Cause | None:
    if evidence.outcome.code == exit_codes.NOT_SAVED:
        return Cause.NOT_SAVED
    if evidence.has_stacks or evidence.outcome.is_unresponsive:
        return Cause.SUSPENDED if evidence.outcome.was_suspended else Cause.HANG
    return Cause.NODE_FAILED if evidence.lost_nodes else Cause.WORKER_CRASHED


_CAUSE_FINDERS = (_cause_by_exit_code, _cause_by_slurm, _cause_if_stop_asked, _cause_by_stop_code, _cause_of_failure)
