"""What a supervisor does first if the one before it died in this start of the job: it ends its steps and its attempt."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddp_hpc.base import exit_codes, processes
from ddp_hpc.base.errors import ConfigError, UnreadableError
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.ending.requeue_job import leave
from ddp_hpc.job.ending.stale_attempts import end_done
from ddp_hpc.job.job_context import JobContext, given_world
from ddp_hpc.job.run_records import RunRecords
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.run import requeue
from ddp_hpc.run.config import load_resolved
from ddp_hpc.run.requeue import Decision
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, End, Ending, Ledger, Next
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import since_submission
from ddp_hpc.run.spec.launch import LaunchSpec, RestartSpec
from ddp_hpc.run.workload.protocol import Workload
from ddp_hpc.run.workload.table import progress_without_spec, workload_of

LEAVE_S = 10.0
"""How long the processes of a dead supervisor may take to exit, as srun and the agents notice its death."""
CANCEL_S = 30.0
"""How long Slurm may take to cancel the steps of those that do not."""
CONFIG_PATIENCE_S = 10.0
"""How long to wait for a file system that does not show the run's configuration; not longer, as the time limit may be near."""


def end_leftover_steps(run: RunDir, allocation: Allocation, environ: Mapping[str, str]) -> None:
    """Wait until the job steps of the dead supervisor have ended; cancel those that stay."""
    # srun inherits the run's lock, but its tasks do not. SIGKILL cannot be caught (signal(7)), so a killed srun passes nothing
    # on, and its tasks may train on; an agent that is stopped (SIGSTOP) does not notice either. Some file systems support no
    # locks. So Slurm is asked in any case.
    is_held = _is_held(run, LEAVE_S)
    SlurmJob(allocation=allocation, environ=environ).cancel_steps()
    if is_held:
        _is_held(run, CANCEL_S)


def _is_held(run: RunDir, patience_s: float) -> bool:
    """Wait until the run's lock is free; return whether it is still held after `patience_s`."""
    lock_fd = processes.take_lock(run.lock, patience_s=patience_s)
    if lock_fd is None:
        return True
    os.close(lock_fd)
    return False


def take_over(
    run: RunDir, allocation: Allocation | None, environ: Mapping[str, str], *, how: str, since: int = 0
) -> int | None:
    """Record how the dead supervisor's attempt ended, and do what it had decided but not done.

    `how` says how the supervisor ended; `since` is the first attempt that it, or one before it, may have begun. Returns the exit
    code where nothing is left to do, else None.
    """
    ledger = Ledger.read(run)
    newest = ledger.newest
    if newest is None or newest.attempt < since or not _is_of_this_start(newest, allocation):
        return None
    end = newest.end or write_down_death(run, ledger, allocation, f"ddp-hpc's supervisor process {how}")
    if end.next in {Next.REQUEUE, Next.SUCCESSOR} and allocation is not None:
        return _leave(run, newest.attempt, end, allocation, environ)
    if end.next == Next.IN_PLACE:
        return None
    return exit_codes.FAILED if end.exit_code < 0 else end.exit_code


def write_down_death(
    run: RunDir, ledger: Ledger, allocation: Allocation | None, reason: str, *, may_go_on: bool = True
) -> End:
    """Record the end of the newest attempt, whose supervisor could not; return it. Nothing follows if no guardian is there."""
    asked, newest, records = _asked(run), ledger.newest, RunRecords(run)
    assert newest is not None  # noqa: S101  the callers looked
    workload = asked[1] if asked else None
    newest_step = progress_without_spec(run, ledger) if workload is None else workload.progress(run, ledger)
    if workload is not None and (done := end_done(records, workload, newest.attempt, newest_step)):
        return done
    attempts = since_submission(ledger, records.queued())
    decision = _decide(attempts, asked, allocation, newest_step)
    if not may_go_on:
        decision = Decision(ending=decision.ending, why=decision.why)
    reason = "; ".join(part for part in (reason, decision.why) if part)
    end = End(
        ending=Ending.FAILED,
        exit_code=exit_codes.FAILED,
        reason=reason,
        cause=Cause.SUPERVISOR_DIED,
        last_step=newest_step,
        next=decision.next,
    )
    records.end(newest.attempt, end)
    then = "; ddp-hpc tries to continue the run on the same nodes" if decision.next == Next.IN_PLACE else ""
    sys.stderr.write(f"note: attempt {newest.attempt} ended: {reason}{then}\n")
    return end


def _decide(
    attempts: Sequence[Attempt],
    asked: tuple[LaunchSpec, Workload] | None,
    allocation: Allocation | None,
    newest_step: int,
) -> Decision:
    """Return what follows a supervisor's death: without Slurm, too, another attempt, as the guardian starts a supervisor."""
    cause = Cause.SUPERVISOR_DIED
    spec, workload = asked or (None, None)
    policy = RestartSpec() if spec is None else spec.restart
    situation = requeue.Situation(
        cause=cause,
        num_without_progress=requeue.num_without_progress(attempts, newest_step, cause),
        may_requeue=True if spec is None else spec.slurm.requeue,
    )
    if workload is not None:
        situation = replace(situation, without_progress=workload.without_progress)
    decision = requeue.decide(situation, policy)
    if allocation is None and decision.next:
        return Decision(ending=decision.ending, next=Next.IN_PLACE)
    return decision


def _asked(run: RunDir) -> tuple[LaunchSpec, Workload] | None:
    """Return what the run's configuration asks for; None where it cannot be read."""
    try:
        spec = load_resolved(run.config, is_patient=True, patience_s=CONFIG_PATIENCE_S)
    except (ConfigError, UnreadableError) as error:
        sys.stderr.write(f"note: {error} So ddp-hpc decides by the defaults of `restart` whether the run continues.\n")
        return None
    return spec, workload_of(spec)


def _is_of_this_start(newest: Attempt, allocation: Allocation | None) -> bool:
    if allocation is None:
        return newest.cluster == "local"
    return (newest.job_id, newest.restart) == (allocation.scontrol_id, allocation.restart_count)


def _leave(run: RunDir, attempt: int, end: End, allocation: Allocation, environ: Mapping[str, str]) -> int | None:
    """Requeue the job as was decided, if the dead supervisor has not done so."""
    asked, noted = _asked(run), RunRecords(run).queued()
    if asked is None:
        return None
    spec, workload = asked
    if end.next == Next.REQUEUE or noted is None or noted.job_id == allocation.scontrol_id:
        context = JobContext(
            run=run,
            spec=spec,
            workload=workload,
            world=given_world(spec, allocation),
            allocation=allocation,
            is_for_slurm=True,
            environ=environ,
        )
        leave(context, Conclusion(attempt=attempt, end=end, exclude=end.failed_nodes))
    return end.exit_code
