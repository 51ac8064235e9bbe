"""What a supervisor does first if the one before it died in this start of the job: it ends its steps and its attempt."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import ConfigError, UnreadableError
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.ending.requeue_job import carry_out_decision
from ddp_hpc.job.ending.stale_attempts import record_if_finished
from ddp_hpc.job.job_context import JobContext, read_context
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run import requeue
from ddp_hpc.run.run_dir.ledger import Cause, End, Ledger, Next, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import attempts_of_submission, read_queued_job
from ddp_hpc.run.spec.launch import RestartSpec
from ddp_hpc.run.workload.table import progress_without_spec

EXIT_TIMEOUT_S = 10.0
"""How long the processes of a dead supervisor may take to exit, as srun and the agents notice its death."""
CANCEL_TIMEOUT_S = 30.0
"""How long Slurm may take to cancel the steps of those that do not."""
CONFIG_PATIENCE_S = 10.0
"""How long to wait for a file system that does not show the run's configuration; not longer, as the time limit may be near."""


def end_leftover_steps(run: RunDir, job: SlurmJob) -> None:
    """Wait until the job steps of the dead supervisor have ended; cancel those that stay."""
    # srun inherits the run's lock, but its tasks do not. SIGKILL cannot be caught (signal(7)), so a killed srun passes nothing
    # on, and its tasks may train on; an agent that is stopped (SIGSTOP) does not notice either. Some file systems support no
    # locks. So Slurm is asked in any case.
    is_held = _is_held_after_wait(run, EXIT_TIMEOUT_S)
    job.cancel_steps()
    if is_held:
        _is_held_after_wait(run, CANCEL_TIMEOUT_S)


def _is_held_after_wait(run: RunDir, patience_s: float) -> bool:
    """Wait until the run's lock is free; return whether it is still held after `patience_s`."""
    lock_fd = processes.take_lock(run.lock, patience_s=patience_s)
    if lock_fd is None:
        return True
    os.close(lock_fd)
    return False


def take_over_attempt(run: RunDir, job: SlurmJob | None, *, how: str, since: int = 0) -> int | None:
    """Record how the dead supervisor's attempt ended, and do what it had decided but not done.

    `how` says how the supervisor ended; `since` is the first attempt that it, or one before it, may have begun. Returns the exit
    code where nothing is left to do, else None.
    """
    ledger = Ledger.read(run)
    newest = ledger.newest
    if newest is None or newest.attempt < since:
        return None
    here = (job.job_id, job.allocation.restart_count) if job else None
    is_of_this_start = (newest.job_id, newest.restart) == here if here else newest.cluster == "local"
    if not is_of_this_start:
        return None
    end = newest.end or record_death(run, ledger, job, f"ddp-hpc's supervisor process {how}")
    if end.next in {Next.REQUEUE, Next.SUCCESSOR} and job is not None:
        context, noted = _read_context(run, job), read_queued_job(run)
        if context is None:
            return None
        if end.next == Next.REQUEUE or noted is None or noted.job_id == job.job_id:  # else the next job is submitted
            carry_out_decision(context, Conclusion(attempt=newest.attempt, end=end, exclude=end.failed_nodes))
        return end.exit_code
    if end.next == Next.IN_PLACE:
        return None
    return exit_codes.FAILED if end.exit_code < 0 else end.exit_code


def record_death(run: RunDir, ledger: Ledger, job: SlurmJob | None, reason: str, *, may_go_on: bool = True) -> End:
    """Record the end of the newest attempt, whose supervisor could not; return it. Nothing follows if no guardian is there."""
    context, newest, cause = _read_context(run, job), ledger.newest, Cause.SUPERVISOR_DIED
    assert newest is not None  # noqa: S101  the callers looked
    newest_step = context.workload.progress(run, ledger) if context else progress_without_spec(run, ledger)
    if context and (done := record_if_finished(run, context.workload, newest.attempt, newest_step)):
        return done
    attempts = attempts_of_submission(ledger, read_queued_job(run))
    num = requeue.num_without_progress(attempts, newest_step, cause)
    situation = requeue.DecisionInputs(cause=cause, num_without_progress=num)
    if context:
        words, may_requeue = context.workload.without_progress, context.spec.slurm.requeue
        situation = replace(situation, without_progress=words, may_requeue=may_requeue)
    decision = requeue.decide_next(situation, context.spec.restart if context else RestartSpec())
    # Without Slurm, too, another attempt follows: the guardian starts a supervisor for it.
    follows = Next.IN_PLACE if job is None and decision.next else decision.next
    end = replace(decision, next=follows if may_go_on else Next.NOTHING).make_end(
        reason, cause=cause, last_step=newest_step
    )
    record_end(run, newest.attempt, end)
    then = "; ddp-hpc tries to continue the run on the same nodes" if end.next == Next.IN_PLACE else ""
    sys.stderr.write(f"note: attempt {newest.attempt} ended: {end.reason}{then}\n")
    return end


def _read_context(run: RunDir, job: SlurmJob | None) -> JobContext | None:
    """Return what the run's configuration asks for, and its job; None where it cannot be read."""
    try:
        return read_context(run, job, patience_s=CONFIG_PATIENCE_S)
    except (ConfigError, UnreadableError) as error:
        sys.stderr.write(f"note: {error} So ddp-hpc decides by the defaults of `restart` whether the run continues.\n")
        return None
