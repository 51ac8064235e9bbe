"""What follows where the supervisor itself fails, by a bug or an error of the disk: a decision with fewer facts.

Requeueing the job matters more than its records: a record that the disk does not take is printed to the job's log.
"""

from __future__ import annotations

import sys
import time
import traceback
from contextlib import suppress

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.job.ending import attempt_end, requeue_job
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.job.slurm_job import await_slurm
from ddp_hpc.job.workers import Workers
from ddp_hpc.run import requeue
from ddp_hpc.run.run_dir.ledger import Cause, Ending, Ledger, record_end
from ddp_hpc.run.run_dir.records import attempts_of_submission, read_queued_job

REQUEUE_PATIENCE_S = 600.0
"""How long to retry a plain requeue, after requeueing the job as decided has failed."""
_FALLBACK_CAUSE = Cause.UNEXPLAINED


def print_error(error: Exception) -> str:
    """Print an unexpected error with its traceback; return it in one line."""
    traceback.print_exception(error)
    return f"ddp-hpc's own supervisor process failed: {type(error).__name__}: {error} (traceback in the job's log)"


def end_workers_after_error(error: Exception, workers: Workers) -> Outcome:
    """End the workers; return the outcome of an attempt in which the supervisor failed."""
    reason = print_error(error)
    try:
        workers.close()
    except Exception as second:  # noqa: BLE001  the first is what counts
        print_error(second)
    return Outcome(code=exit_codes.FAILED, reason=reason)


def conclude_in_any_case(context: JobContext, attempt: int, outcome: Outcome) -> Conclusion:
    """Conclude as `attempt_end` does; if that fails, decide by what can still be read."""
    try:
        return attempt_end.conclude_attempt(context, attempt, outcome)
    except Exception as error:  # noqa: BLE001  whatever failed, the job must not end because of it
        reasons = [outcome.reason, print_error(error)]
    if outcome.code == exit_codes.FENCED:
        end = requeue.Decision(ending=Ending.FENCED).make_end(*reasons, cause=Cause.FENCED)
        return Conclusion(attempt=attempt, end=end)
    num, newest_step, ledger = 1, None, None
    with suppress(Exception):
        ledger = Ledger.read(context.run)
    with suppress(Exception):  # at once: `attempt_end` has waited for the file system, and the time limit may be near
        newest_step = context.workload.progress(context.run, ledger or Ledger(), is_patient=False)
    if ledger is not None and newest_step is not None:
        with suppress(Exception):
            attempts = attempts_of_submission(ledger, read_queued_job(context.run))
            num = requeue.num_without_progress(attempts, newest_step, _FALLBACK_CAUSE)
    situation = requeue.DecisionInputs(
        cause=_FALLBACK_CAUSE,
        num_without_progress=num,
        without_progress=context.workload.without_progress,
        is_on_slurm=context.allocation is not None,
        may_requeue=context.spec.slurm.requeue,
    )
    decision = requeue.decide_next(situation, context.spec.restart)
    end = decision.make_end(*reasons, cause=_FALLBACK_CAUSE, last_step=newest_step)
    try:
        record_end(context.run, attempt, end)
    except Exception as error:  # noqa: BLE001  requeueing the job matters more
        sys.stderr.write(
            f"note: ddp-hpc could not write to attempts.jsonl, the run's record of attempts, how attempt {attempt} ended: {error}. "
            "Checkpoints are not affected, but `ddp-hpc status` lacks this end. Check the space and the quota there.\n"
        )
    return Conclusion(attempt=attempt, end=end, exclude=decision.exclude)


def carry_out_in_any_case(context: JobContext, conclusion: Conclusion) -> None:
    """Leave as `requeue_job` does; if that fails, requeue the job without records and excluded nodes."""
    try:
        requeue_job.carry_out_decision(context, conclusion)
    except Exception as error:
        print_error(error)
        job = context.job
        if job is None or not conclusion.end.next or not context.spec.slurm.requeue:
            raise
    else:
        return
    note = (
        f"ddp-hpc tries for up to {REQUEUE_PATIENCE_S / 60:.0f} minutes to put the job back into Slurm's queue; if the job is not in the queue "
        "after that, submit the run again"
    )
    await_slurm(job.requeue, REQUEUE_PATIENCE_S, errors=(ConfigError, SlurmUnavailableError, OSError), note=note)
    time.sleep(requeue_job.STAY_AFTER_REQUEUE_S)
