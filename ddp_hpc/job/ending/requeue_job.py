"""Requeues the job, or submits the next one, once no worker is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ddp_hpc import requeue
from ddp_hpc.errors import ConfigError, DdpHpcError, SlurmUnavailableError
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.ending.best_effort import best_effort
from ddp_hpc.job.ending.causes import is_cancelled, is_ending
from ddp_hpc.job.ending.evidence import accounted_as, job_now
from ddp_hpc.job.ending.stale_attempts import nodes_to_spare
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.ledger import Cause, Ledger, Next, record_end
from ddp_hpc.records import QueuedJob, read_queued_job, read_stop_request, write_queued_job
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client

EXCLUDE_PATIENCE_S = 25.0
"""How long to try to set a requeued job's excluded nodes; less than KillWait (30 s by default, slurm.conf(5)), after which
Slurm kills this process."""

SLURM_PATIENCE_S = 24 * 3600.0
"""How long to wait for a controller that does not answer, before the run is given up: as long as a repair may take. If only
this node cannot reach it, it may start the job on other nodes meanwhile, which `_ask_again` sees once it answers."""

ENDED_BY_USER: Mapping[Cause, str] = {
    Cause.CANCELLED: "cancelled by the user",
    Cause.STOP_ASKED: "stopped by the user",
}
"""Why a run does not go on, though the decision said so: the user has ended it meanwhile."""

_CONTINUATIONS: Mapping[Next, str] = {
    Next.REQUEUE: "the job goes back into the queue, and the run continues when it starts again",
    Next.SUCCESSOR: "the run continues in a new job, which starts after this one",
    Next.IN_PLACE: "the run continues on the same nodes",
    Next.SLURM: "Slurm has put the job back into the queue, and the run continues when it starts again",
}
"""What follows an attempt that ends the job -> what the job's log says of it."""


def leave(context: JobContext, conclusion: Conclusion) -> None:
    """Carry out the decision, now that no worker is left: requeue the job, submit the next one, or let the run end."""
    decision, allocation = conclusion.decision, context.allocation
    if allocation is None or not decision.next:
        if conclusion.reason:
            sys.stderr.write(f"ended: {conclusion.reason}\n")
        return
    sys.stderr.write(f"note: {conclusion.reason}; {_CONTINUATIONS[decision.next]}\n")
    try:
        _continue_patiently(context, conclusion)
    except DdpHpcError as error:
        _end_here(
            context,
            conclusion,
            f"{conclusion.reason}; the job could not go back into the queue ({error}), so submit the run again",
        )


def _continue_patiently(context: JobContext, conclusion: Conclusion) -> None:
    """Requeue or submit; retry while Slurm does not answer, as a controller that restarts ends no job meanwhile."""
    deadline, is_noted = time.monotonic() + SLURM_PATIENCE_S, False
    while True:
        try:
            return _continue(context, conclusion)
        except SlurmUnavailableError as error:
            if time.monotonic() >= deadline:
                raise
            if not is_noted:
                sys.stderr.write(f"note: the job waits until Slurm answers: {error}\n")
            is_noted = True
            time.sleep(2.0)


def _continue(context: JobContext, conclusion: Conclusion) -> None:
    decision, allocation = conclusion.decision, context.allocation
    assert allocation is not None  # noqa: S101  `leave` looked
    ledger = _ledger(context.run)
    is_back, cause, queued = _ask_again(context, ledger)
    if cause is not None:
        _end_here(context, conclusion, ENDED_BY_USER[cause], cause=cause)
        return
    match decision.next:
        case Next.SUCCESSOR if not is_back:
            options = [f"--dependency=afterany:{allocation.job_id}"]
            if excluded := _excluded(context, ledger, decision.exclude):
                options.append(f"--exclude={excluded}")
            job_id = client.submit(context.run.job_script, context.environ, options)
            _note(context, conclusion, queued, job_id)
        case Next.REQUEUE if not is_back:
            # From inside its own job, `scontrol requeue` makes Slurm kill the batch script, and so this process (scontrol(1),
            # https://slurm.schedmd.com/scontrol.html#OPT_requeue). So the note comes first, and nothing after it is vital.
            _note(context, conclusion, queued, allocation.job_id)
            _requeue(context, ledger)
            _exclude(context, ledger, decision.exclude)
        case Next.SLURM | Next.REQUEUE | Next.SUCCESSOR:  # Slurm has put it back by itself
            _note(context, conclusion, queued, allocation.job_id)
            _exclude(context, ledger, decision.exclude)


def _ledger(run: RunDir) -> Ledger:
    """Read the ledger; go on without it where it cannot be read, as requeueing the job matters more than its nodes."""
    try:
        return Ledger.read(run)
    except OSError as error:
        sys.stderr.write(
            f"note: {run.attempts} cannot be read, so the next job may get nodes on which the run failed before: {error}\n"
        )
        return Ledger()


def _requeue(context: JobContext, ledger: Ledger) -> None:
    """Requeue the job; ignore a refusal where it is back already, by Slurm or by an order whose answer was lost."""
    allocation = context.allocation
    assert allocation is not None  # noqa: S101  `leave` looked
    try:
        client.requeue(allocation.scontrol_id, context.environ)
    except ConfigError:
        is_back, _, _ = _ask_again(context, ledger)
        if not is_back:
            raise


def _ask_again(context: JobContext, ledger: Ledger) -> tuple[bool, Cause | None, QueuedJob | None]:
    """Return whether the job is back in the queue already, whether the user has ended it meanwhile, and the note of it.

    `scontrol requeue` would revive a job that was cancelled, and kill one that Slurm has started again on other nodes.
    """
    # Slurm first, as it may take long to answer: the user may cancel meanwhile, which the note, read last, says.
    allocation, job = context.allocation, job_now(context)
    queued = read_queued_job(context.run)
    if allocation is None:
        return False, None, queued
    if queued is not None and queued.job_id == allocation.job_id and queued.cancelled_at is not None:
        return False, Cause.CANCELLED, queued
    if job is not None and (job.restarts or 0) > allocation.restart_count:
        return True, None, queued
    if read_stop_request(context.run) == "end":
        return False, Cause.STOP_ASKED, queued
    if job is None or not is_ending(job):
        return False, None, queued
    state = "" if job.preempted_at is None else accounted_as(context, ledger)
    return False, Cause.CANCELLED if is_cancelled(job, state) else None, queued


def _end_here(context: JobContext, conclusion: Conclusion, reason: str, *, cause: Cause | None = None) -> None:
    """Record that nothing follows after all; `cause` is set where the user decided so."""
    sys.stderr.write(f"note: {reason}\n")
    end = replace(conclusion.end, cause=cause or conclusion.cause, next=Next.NOTHING)
    record_end(
        context.run,
        attempt=conclusion.attempt,
        ending=requeue.TABLE[cause].ending if cause else conclusion.decision.ending,
        exit_code=conclusion.exit_code,
        reason=reason,
        end=end,
    )


def _note(context: JobContext, conclusion: Conclusion, queued: QueuedJob | None, job_id: str) -> None:
    """Record the job that continues the run, as `submit` records its own."""
    since = queued.since if queued else conclusion.attempt
    job = QueuedJob(job_id=job_id, attempt=conclusion.attempt + 1, at=time.time(), since=since)
    with best_effort():
        write_queued_job(context.run, job)


def _excluded(context: JobContext, ledger: Ledger, lost: Sequence[str]) -> str:
    """Return the list of nodes that the next job should not get: those of `slurm.exclude`, and failed ones as long as enough others are left."""
    return ",".join(filter(None, [context.spec.slurm.exclude, *sorted(nodes_to_spare(context, ledger, lost))]))


def _exclude(context: JobContext, ledger: Ledger, nodes: Sequence[str]) -> None:
    """Exclude nodes from the next start of the job.

    The list is made anew where any node has ever failed, so that a node whose failures are forgotten, or that is needed after
    all, is allowed again.
    """
    allocation = context.allocation
    has_failed = nodes or any(attempt.failed_nodes for attempt in ledger.attempts)
    if allocation is None or not has_failed:
        return
    text = _excluded(context, ledger, nodes)
    # Slurm changes ExcNodeList of pending jobs only ("Job is no longer pending execution"), and `scontrol requeue` returns
    # while the job still runs. So the update is refused until Slurm has begun to end this start of the job.
    deadline = time.monotonic() + EXCLUDE_PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(ConfigError, SlurmUnavailableError):
            client.update(allocation.scontrol_id, context.environ, ExcNodeList=text)
            if text:
                sys.stderr.write(
                    f"note: the run failed on {text}, so the job now excludes these nodes (`ExcNodeList` in `scontrol show job`)\n"
                )
            return
        time.sleep(0.1)
