"""Requeues the job, or submits the next one, once no worker is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ddp_hpc.base.errors import ConfigError, DdpHpcError, SlurmUnavailableError
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.ending.causes import is_job_cancelled, is_job_ending
from ddp_hpc.job.ending.stale_attempts import nodes_to_leave_out
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.job.slurm_job import SlurmJob, await_slurm
from ddp_hpc.run import requeue
from ddp_hpc.run.run_dir.ledger import Cause, Ledger, Next, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, read_stop_request, write_queued_job

EXCLUDE_PATIENCE_S = 25.0
"""How long to try to set a requeued job's excluded nodes; less than KillWait (30 s by default, slurm.conf(5)), after which
Slurm kills this process."""

STAY_AFTER_REQUEUE_S = 1.0
"""How long this process stays once the job is back in the queue. Before 24.11.1, Slurm may start a job again in the second in which it
ended it, where a node that does not answer is set down in that second. Then it refuses the start ("Job credential revoked"), and the
job is FAILED for good. It does not start the job while this process runs."""

SLURM_PATIENCE_S = 24 * 3600.0
"""How long to wait for a controller that does not answer, before the run is given up: as long as a repair may take. If only
this node cannot reach it, it may start the job on other nodes meanwhile, which `_read_before_requeue` sees once it answers."""

USER_END_TEXTS: Mapping[Cause, str] = {
    Cause.CANCELLED: "cancelled by the user",
    Cause.STOP_ASKED: "stopped by the user",
}
"""Why a run does not go on, though the decision said so: the user has ended it meanwhile."""


def carry_out_decision(context: JobContext, conclusion: Conclusion) -> None:
    """Carry out the decision, now that no worker is left: requeue the job, submit the next one, or let the run end."""
    end, job = conclusion.end, context.job
    if job is None or not end.next:
        if end.reason:
            sys.stderr.write(f"ended: {end.reason}\n")
        return
    sys.stderr.write(f"note: {end.reason}; {requeue.MESSAGE_BY_NEXT[end.next]}\n")
    try:
        await_slurm(lambda: _requeue_or_submit(context, job, conclusion), SLURM_PATIENCE_S)
    except DdpHpcError as error:
        reason = f"{end.reason}; the job could not go back into the queue ({error}), so submit the run again"
        _record_last_end(context.run, conclusion, reason)


def _requeue_or_submit(context: JobContext, job: SlurmJob, conclusion: Conclusion) -> None:
    follows, run, attempt = conclusion.end.next, context.run, conclusion.attempt
    ledger = Ledger()
    try:
        ledger = Ledger.read(context.run)
    except OSError as error:  # requeueing the job matters more than its nodes
        sys.stderr.write(
            f"note: {context.run.attempts} cannot be read ({error}). The run continues all the same, but its next job may get "
            "nodes on which it failed before.\n"
        )
    is_back, cause, queued = _read_before_requeue(run, job, ledger)
    if cause is not None:
        _record_last_end(run, conclusion, USER_END_TEXTS[cause], cause=cause)
        return
    is_new_job, job_id = follows == Next.SUCCESSOR and not is_back, job.job_id
    if is_new_job:
        excluded = _excluded_nodes_text(context, sorted(nodes_to_leave_out(context, job, ledger, conclusion.exclude)))
        job_id = job.submit_next(context.run.job_script, excluded, context.spec)
    with best_effort():  # as `submit` records its own
        since, cluster = (queued.since, queued.slurm_cluster) if queued else (attempt, "")
        next_job = QueuedJob(job_id=job_id, attempt=attempt + 1, at=time.time(), since=since, slurm_cluster=cluster)
        write_queued_job(run, next_job)
    if is_new_job:
        return
    if follows == Next.REQUEUE and not is_back:  # else Slurm has put it back by itself
        # From inside its own job, `scontrol requeue` makes Slurm kill the batch script, and so this process (scontrol(1),
        # https://slurm.schedmd.com/scontrol.html#OPT_requeue). So the note comes first, and nothing after it is vital.
        try:
            job.requeue()
        except ConfigError:
            # A refusal means nothing where the job is back, by Slurm or by an order whose answer was lost.
            if not job.is_requeued():
                raise
    _exclude_nodes(context, job, ledger, conclusion.exclude)
    time.sleep(STAY_AFTER_REQUEUE_S)


def _read_before_requeue(run: RunDir, job: SlurmJob, ledger: Ledger) -> tuple[bool, Cause | None, QueuedJob | None]:
    """Return whether the job is back in the queue already, whether the user has ended it meanwhile, and the note of it.

    `scontrol requeue` would revive a job that was cancelled, and kill one that Slurm has started again on other nodes.
    """
    # Slurm first, as it may take long to answer: the user may cancel meanwhile, which the note, read last, says.
    record = job.query_record()
    queued = read_queued_job(run)
    if queued is not None and queued.job_id == job.job_id and queued.cancelled_at is not None:
        return False, Cause.CANCELLED, queued
    if record is not None and (record.restarts or 0) > job.allocation.restart_count:
        return True, None, queued
    if read_stop_request(run) == "end":
        return False, Cause.STOP_ASKED, queued
    if record is None or not is_job_ending(record):
        return False, None, queued
    state = "" if record.preempted_at is None else job.accounted_end(ledger)
    return False, Cause.CANCELLED if is_job_cancelled(record, state) else None, queued


def _record_last_end(run: RunDir, conclusion: Conclusion, reason: str, *, cause: Cause | None = None) -> None:
    """Record that nothing follows after all; `cause` is set where the user decided so."""
    sys.stderr.write(f"note: {reason}\n")
    end = replace(conclusion.end, next=Next.NOTHING, reason=reason)
    with best_effort():  # on a full disk, too, the job does not go back
        record_end(
            run, conclusion.attempt, replace(end, cause=cause, ending=requeue.RULES[cause].ending) if cause else end
        )


def _excluded_nodes_text(context: JobContext, failed: Sequence[str]) -> str:
    return ",".join(filter(None, [context.spec.slurm.exclude, *failed]))


def _exclude_nodes(context: JobContext, job: SlurmJob, ledger: Ledger, nodes: Sequence[str]) -> None:
    """Exclude nodes from the next start of the job.

    The list is made anew where any node has ever failed, so that a node whose failures are forgotten, or that is needed after
    all, is allowed again.
    """
    has_failed = nodes or any(attempt.failed_nodes for attempt in ledger.attempts)
    if not has_failed:
        return
    failed = sorted(nodes_to_leave_out(context, job, ledger, nodes))
    # Slurm changes ExcNodeList of pending jobs only ("Job is no longer pending execution"), and `scontrol requeue` returns
    # while the job still runs. So the update is refused until Slurm has begun to end this start of the job.
    deadline = time.monotonic() + EXCLUDE_PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(ConfigError, SlurmUnavailableError):
            job.exclude_nodes(_excluded_nodes_text(context, failed))
            if failed:
                names, asked = ", ".join(failed), context.spec.slurm.exclude
                besides = f", besides {asked} of `slurm.exclude`" if asked else ""
                sys.stderr.write(
                    f"note: the run failed on {names}, so the job now excludes {names}{besides} (`ExcNodeList` in `scontrol show job`)\n"
                )
            return
        time.sleep(0.1)
