"""What came before this start of a job: other jobs that use the run, attempts without a recorded end, failed nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from ddp_hpc.base import exit_codes
from ddp_hpc.cluster.slurm import states
from ddp_hpc.job.ending import causes
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run import requeue
from ddp_hpc.run.requeue import DecisionInputs
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, End, Ending, Ledger, Next, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import attempts_of_submission, is_done, read_queued_job
from ddp_hpc.run.workload.protocol import Workload


def is_used_by_other_job(newest: Attempt, job: SlurmJob) -> bool:
    """Ask Slurm whether another job uses the run: some file systems have locks that hold within one node only."""
    is_open = newest.ending is None and newest.cluster == "slurm" and newest.job_id != job.job_id
    return is_open and job.is_running(newest.job_id)


def close_stale_attempt(run: RunDir, workload: Workload, job: SlurmJob) -> None:
    """Record the end of the newest attempt by what Slurm knows of it, if its supervisor died before it could."""
    ledger = Ledger.read(run)
    newest = ledger.newest
    if newest is None or newest.ending is not None or newest.cluster != "slurm":
        return
    progress = workload.progress(run, ledger)
    if record_if_finished(run, workload, newest.attempt, progress):
        return
    state = job.accounted_end(ledger)
    cause = causes.CAUSES_BY_STATE.get(states.parse_state(state), Cause.UNEXPLAINED)
    # If none is down by now, it was the first: had another failed, the supervisor would have recorded it.
    failed = (tuple(job.lost_nodes(newest.nodes)) or newest.nodes[:1]) if cause == Cause.NODE_FAILED else ()
    by_slurm = f"Slurm accounting says {state}" if state else "Slurm accounting does not say why"
    reason = f"ddp-hpc's supervisor process ended without recording why; {by_slurm}"
    end = End(
        ending=Ending.FAILED,
        exit_code=-9,
        reason=reason,
        cause=cause,
        last_step=progress,
        next=Next.SLURM,
        failed_nodes=failed,
    )
    record_end(run, newest.attempt, end)
    sys.stderr.write(f"note: attempt {newest.attempt} on {newest.host} ended: {reason}. This job continues the run.\n")


def why_no_attempt(context: JobContext, job: SlurmJob) -> str:
    """Return why a job that Slurm has requeued without being asked begins no attempt, as Slurm has no limit of such requeues; empty where it begins one."""
    ledger = Ledger.read(context.run)
    attempts = attempts_of_submission(ledger, read_queued_job(context.run))
    if not attempts or (attempts[-1].next, attempts[-1].job_id) != (Next.SLURM, job.job_id):
        return ""
    cause, words = attempts[-1].cause or Cause.UNEXPLAINED, context.workload.without_progress
    num = requeue.num_without_progress(attempts, context.workload.progress(context.run, ledger), cause)
    situation = DecisionInputs(cause=cause, num_without_progress=num, without_progress=words)
    return requeue.why_run_ends(situation, context.spec.restart)


def record_if_finished(run: RunDir, workload: Workload, attempt: int, newest_step: int) -> End | None:
    """Record that an attempt has finished the run, if it has: its supervisor died between that and the end in the ledger."""
    if not is_done(run, workload.goal):
        return None
    end = End(ending=Ending.FINISHED, exit_code=exit_codes.FINISHED, cause=Cause.FINISHED, last_step=newest_step)
    record_end(run, attempt, end)
    return end


def bad_nodes_of_job(context: JobContext, job: SlurmJob, ledger: Ledger) -> tuple[str, ...]:
    """Return the nodes of this job that have failed too often, as long as the partition has enough others."""
    left_out = set(nodes_to_leave_out(context, job, ledger))
    return tuple(node for node in job.allocation.node_names if node in left_out)


def nodes_to_leave_out(context: JobContext, job: SlurmJob, ledger: Ledger, lost: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the nodes that a job of this run should not get: `lost`, and those that failed too often.

    Where the partition has too few others, some are allowed again, and the job's log says so.
    """
    bad = requeue.bad_nodes(ledger.attempts, context.spec.restart, now=time.time())
    return job.suspects_to_exclude([*sorted({*lost} - {*bad}), *bad], context.spec, context.run.job_script)
