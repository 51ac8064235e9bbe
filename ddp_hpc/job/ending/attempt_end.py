"""The end of an attempt: finds out why it ended, decides what follows by the table (`requeue`), and records both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.base import exit_codes
from ddp_hpc.job.ending import blame
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.ending.causes import cause_of
from ddp_hpc.job.ending.evidence import gather_evidence
from ddp_hpc.job.ending.hang_report import report_hang
from ddp_hpc.job.job_context import JobContext, Outcome
from ddp_hpc.run import requeue
from ddp_hpc.run.requeue import DecisionInputs
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure, silent_end_message
from ddp_hpc.run.run_dir.ledger import Cause, End, record_end
from ddp_hpc.run.run_dir.records import read_remarks, write_done

_EARLY_SIGNAL_MESSAGE = "a stop signal killed the workers before they had installed their signal handlers: a user sent it to the job's steps, or srun did because one task failed"


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What an attempt's end means."""

    attempt: int
    end: End
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt should not get."""
    is_slurm_away: bool = False
    """Whether the controller did not answer, or was not asked."""


def conclude_attempt(context: JobContext, attempt: int, outcome: Outcome) -> Conclusion:
    """Find out why an attempt ended, decide what follows, and write both into the ledger."""
    evidence = gather_evidence(context, attempt, outcome)
    cause = cause_of(evidence)
    failure = next(iter(evidence.failures), None)
    explained = report_hang(context, attempt, evidence.failures, outcome.network) if cause == Cause.HANG else failure
    unreached = blame.unreached_nodes(cause, outcome.network, context.nodes)
    failed_nodes = unreached or blame.failed_nodes(cause, context, evidence, explained)
    bad_nodes = blame.nodes_to_avoid(evidence.attempts, attempt, cause, failed_nodes, context.spec.restart)
    newest_step = context.workload.progress(context.run, evidence.ledger)
    root = blame.root_failure(cause, evidence.failures, hosts=context.nodes)
    poisoned = requeue.repeated_sample(evidence.attempts, root, newest_step)
    is_without_progress = poisoned and context.workload.progress_on_disk(context.run) == newest_step
    num_alike = requeue.num_alike(evidence.attempts, root, newest_step, now=time.time())
    situation = DecisionInputs(
        cause=cause,
        is_committed=outcome.code == exit_codes.STOPPED,
        has_obeyed=outcome.code in _STOPPED_CODES or _is_secondary_script_failure(failure),
        num_without_progress=requeue.num_without_progress(evidence.attempts, newest_step, cause),
        without_progress=context.workload.without_progress,
        fails_again=poisoned if is_without_progress else "",
        num_alike=num_alike if context.workload.counts_files else 0,
        differs_as=evidence.differs_as,
        has_no_report=explained is None,
        is_on_slurm=context.allocation is not None,
        is_supervised=context.is_supervised,
        goes_on_here=context.workload.goes_on_here,
        is_requeued_by_slurm=evidence.is_requeued_by_slurm,
        failed_nodes=failed_nodes,
        bad_nodes=[node for node in dict.fromkeys((*unreached, *bad_nodes)) if node in context.nodes],
        may_requeue=context.spec.slurm.requeue,
    )
    decision = requeue.decide_next(situation, context.spec.restart)
    message = outcome.reason or _reason_of_end(cause, outcome, explained)
    if (left_out := len(message) - _MAX_REASON_CHARACTERS) > 0:  # error reports have all of it
        message = f"{message[:_MAX_REASON_CHARACTERS]} ... ({left_out} more characters)"
    reasons = [message, *_remarks(context, attempt, cause, outcome, explained)]
    end = decision.make_end(*reasons, cause=cause, last_step=newest_step, failed_nodes=failed_nodes, root=root)
    _record_end(context, attempt, end)
    is_slurm_away = context.allocation is not None and evidence.job is None
    return Conclusion(attempt=attempt, end=end, exclude=decision.exclude, is_slurm_away=is_slurm_away)


def _remarks(
    context: JobContext, attempt: int, cause: Cause, outcome: Outcome, failure: WorkerFailure | None
) -> Sequence[str]:
    """Return what ranks that have finished have remarked, and what is wrong with the network where ranks lost connections."""
    remarks: Sequence[str] = []
    has_left_others = cause == Cause.WORKER_CRASHED and failure is not None and failure.is_secondary
    if cause == Cause.FINISHED or has_left_others:
        with best_effort():
            remarks = read_remarks(context.run, attempt, context.world.world_size)
    if cause == Cause.WORKER_CRASHED and outcome.network is not None and outcome.network.is_faulty:
        return [outcome.network.words]  # the report of a hang says it itself
    return remarks[:_MOST_REMARKS]


_MOST_REMARKS = 3
"""Ranks often remark the same."""
_MAX_REASON_CHARACTERS = 4000
"""Of the ledger, which each command reads."""


def _record_end(context: JobContext, attempt: int, end: End) -> None:
    """Record how an attempt ended; remove the stop request that it obeyed, and the claim of a run's last attempt."""
    is_fenced = end.cause == Cause.FENCED
    if end.cause == Cause.FINISHED:
        with best_effort():
            write_done(context.run, context.workload.goal)
    with best_effort():
        # The newer attempt has already recorded what became of the fenced one.
        how = End(ending=end.ending, exit_code=end.exit_code, reason=end.reason) if is_fenced else end
        record_end(context.run, attempt, how)
    with best_effort():
        if end.cause == Cause.STOP_ASKED:
            # It is obeyed: whoever starts the job again wants the run to continue.
            context.run.stop_request.unlink(missing_ok=True)
        if not end.next and not is_fenced:
            ownership.release_claim(context.run, attempt)


_STOPPED_CODES = {exit_codes.STOPPED, exit_codes.STOPPED_BEFORE_START}
"""What workers exit with that have stopped as they were asked to, perhaps before they had anything to save."""
_WORKER_REPORTED_CAUSES = {
    Cause.WORKER_CRASHED,
    Cause.HANG,
    Cause.REFUSED,
    Cause.DIVERGED,
    Cause.RANKS_DIFFER,
    Cause.NOT_SAVED,
    Cause.STOP_ASKED,
}
"""Causes that a worker's report explains best."""


def _is_secondary_script_failure(failure: WorkerFailure | None) -> bool:
    """Tell whether a script failed only because another of its ranks had ended, as happens when ranks obey a stop one by one."""
    return failure is not None and failure.is_secondary and failure.of_script


def _reason_of_end(cause: Cause, outcome: Outcome, failure: WorkerFailure | None) -> str:
    if cause == Cause.FINISHED or (cause == Cause.STOP_ASKED and outcome.code in _STOPPED_CODES):
        return ""
    if cause in _WORKER_REPORTED_CAUSES and failure is not None:
        if cause == Cause.STOP_ASKED and _is_secondary_script_failure(failure):
            return (
                f"stopped as asked; another rank stopped before rank {failure.rank} on {failure.host}, which then lost its connection. "
                "That costs nothing, unless the script saves when it is stopped: then have all ranks stop after the same step"
            )
        if failure.is_secondary:
            return (
                f"rank {failure.rank} on {failure.host} lost its connection to another rank, or waited for it in vain, and no rank "
                "reported a failure of its own; read the logs (`ddp-hpc logs RUN --all`) and the kernel's log of the nodes (`dmesg`)"
            )
        is_plain = failure.is_plain or failure.rank < 0 or cause == Cause.HANG
        where = f" on {failure.host}" if failure.host else ""
        return failure.exception if is_plain else f"rank {failure.rank}{where}: {failure.exception}"
    if cause in {Cause.WORKER_CRASHED, Cause.STOP_ASKED}:
        return silent_end_message(outcome.code, outcome.step_code)
    return {
        Cause.CANCELLED: "cancelled by the user",
        Cause.FENCED: "a newer start of the run has replaced this one; you need do nothing",
        Cause.REQUEUE_ASKED: "a user, an administrator or Slurm asked the run to stop and go back into the queue",
        Cause.SCRIPT_ASKED: "the script exited with a code of `script.resume_exit_codes`: it asked to be started again",
        Cause.PREEMPTED: "Slurm preempted the job",
        Cause.TIME_LIMIT: "the job reached its time limit",
        Cause.NODE_FAILED: f"{', '.join(outcome.lost_nodes) or 'a node'} failed or stopped answering",
        Cause.HANG: "no worker made progress for longer than `restart.hang_timeout_s`, so ddp-hpc killed the workers",
        Cause.SUSPENDED: "the job was suspended for longer than `restart.hang_timeout_s`, so that timeout killed the workers; raise it where jobs are often suspended",
        Cause.PREFLIGHT: "the check of the nodes before the training failed (`preflight`)",
        Cause.NOT_SAVED: "saves have failed for longer than `checkpoint.max_failing_s`; check the space, the quota and the permissions of the run's directory",
        Cause.UNEXPLAINED: "a stop signal arrived before the workers had installed their signal handlers"
        if outcome.was_signalled
        else _EARLY_SIGNAL_MESSAGE,
    }.get(cause, cause)
