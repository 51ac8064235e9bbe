"""What follows an attempt: why it ended, what the table says (`requeue`), the ledger's word, and the way back."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ddp_hpc import exit_codes, ownership, requeue
from ddp_hpc.durable import make_directories, replace_text
from ddp_hpc.errors import ConfigError, DdpHpcError, SlurmUnavailableError
from ddp_hpc.failure_reports import Phase, WorkerFailure, allowed_phase, read_failures, silent_end, write_failure
from ddp_hpc.job import predecessors, stacks
from ddp_hpc.job.assignment import Assignment, Outcome
from ddp_hpc.job.causes import Evidence, cause_of, is_cancelled, is_ending
from ddp_hpc.job.predecessors import accounted_end, nodes_to_spare
from ddp_hpc.ledger import Attempt, Cause, End, Ledger, Next, record_end
from ddp_hpc.records import (
    QueuedJob,
    read_queued_job,
    read_stop_request,
    since_submission,
    write_done,
    write_queued_job,
)
from ddp_hpc.requeue import Decision, Situation
from ddp_hpc.slurm import client
from ddp_hpc.slurm.queries import JobRecord, is_lost

EXCLUDE_PATIENCE_S = 25.0
"""How long to try to set a requeued job's excluded nodes: Slurm refuses until it has begun to end the job."""

SLURM_PATIENCE_S = 24 * 3600.0
"""How long to wait for a controller that does not answer, with a job to be put back into the queue: as long as it may take
to mend it. Where it is away for this node alone, it starts the job elsewhere, which is seen once it answers."""

ENDED_BY_USER: Mapping[Cause, str] = {
    Cause.CANCELLED: "cancelled by the user",
    Cause.STOP_ASKED: "stopped by the user",
}
"""Why a run does not go on, though it was to, in words."""

_ENDED_EARLY = (
    "a stop signal ended the workers before they could listen: somebody sent it to the job's steps, or srun did, as it does "
    "where a task fails"
)


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """What an attempt's end means."""

    attempt: int
    cause: Cause
    decision: Decision
    reason: str
    is_slurm_away: bool = False
    """Whether the controller did not answer, or needed not be asked."""

    @property
    def exit_code(self) -> int:
        return self.decision.ending.exit_code


def conclude(assignment: Assignment, attempt: int, outcome: Outcome) -> Conclusion:
    """Find out why an attempt ended, decide what follows, and write both into the ledger."""
    run, spec = assignment.run, assignment.spec
    ledger, failures = Ledger.read(run), read_failures(run, attempt)
    evidence = _evidence(assignment, attempt, outcome, ledger)
    cause, attempts = cause_of(evidence), since_submission(ledger, read_queued_job(run))
    failure = next(iter(failures), None)
    if cause == Cause.HANG:
        failure = _write_down_hang(assignment, attempt, failures)
    failed_nodes = _failed_nodes(assignment, cause, failure, evidence)
    if outcome.avoided_nodes:
        # A node that is avoided for its earlier failures has not failed once more: else it is never forgotten.
        known = requeue.bad_nodes(ledger.attempts, spec.restart, now=time.time())
        failed_nodes = tuple(node for node in failed_nodes if node not in known)
    if cause == Cause.REFUSED and has_worked(attempts):
        cause, failed_nodes = Cause.WORKER_CRASHED, _refusing_nodes(assignment, failure)
    newest_step = predecessors.newest_step(run, ledger)
    decision = requeue.decide(
        Situation(
            cause=cause,
            is_committed=outcome.code == exit_codes.STOPPED,
            num_without_progress=requeue.num_without_progress(attempts, newest_step, cause),
            is_mute=failure is None,
            is_on_slurm=assignment.allocation is not None,
            is_requeued_by_slurm=evidence.is_requeued_by_slurm,
            failed_nodes=failed_nodes,
            bad_nodes=_bad_nodes(assignment, attempts, attempt, failed_nodes),
            may_requeue=spec.slurm.requeue,
        ),
        spec.restart,
    )
    reason = _reason(cause, outcome, failure, decision)
    # Of one that is fenced, the newer attempt has written down what became of it.
    is_told = cause != Cause.FENCED
    end = End(cause=cause, last_step=newest_step, next=decision.next, failed_nodes=failed_nodes) if is_told else None
    is_away = assignment.allocation is not None and evidence.job is None
    conclusion = Conclusion(attempt=attempt, cause=cause, decision=decision, reason=reason, is_slurm_away=is_away)
    if cause == Cause.FINISHED:
        with _told_where_the_disk_is_full():
            write_done(run, epochs=spec.train.epochs, max_steps=spec.train.max_steps)
    with _told_where_the_disk_is_full():
        record_end(run, attempt=attempt, ending=decision.ending, exit_code=conclusion.exit_code, reason=reason, end=end)
    with _told_where_the_disk_is_full():
        if cause == Cause.STOP_ASKED:
            run.stop_request.unlink(missing_ok=True)  # it is done: the next start of the job is somebody's own wish
        if not decision.next and cause != Cause.FENCED:
            ownership.release(run, attempt)
    return conclusion


@contextmanager
def _told_where_the_disk_is_full() -> Iterator[None]:
    """Go on without a record that cannot be written: the way back matters more, and the next attempt makes up for it."""
    try:
        yield
    except OSError as error:
        sys.stderr.write(f"note: a record was not written: {error}\n")


def has_worked(attempts: Sequence[Attempt]) -> bool:
    """Tell whether one of these attempts trained: then the input that all of them have can be."""
    return any((one.last_step or 0) > one.first_step for one in attempts)


def _refusing_nodes(assignment: Assignment, failure: WorkerFailure | None) -> tuple[str, ...]:
    """Return the node that has not what the others had: a GPU, a mount, an image."""
    if failure is None:
        return ()
    node = assignment.node_of(failure.rank) if failure.rank >= 0 else failure.host
    return (node,) if node in assignment.nodes else ()


def _evidence(assignment: Assignment, attempt: int, outcome: Outcome, ledger: Ledger) -> Evidence:
    run, spec, allocation = assignment.run, assignment.spec, assignment.allocation
    owns_run = not ownership.is_ousted(run, attempt) and outcome.code != exit_codes.FENCED
    is_clear = outcome.code == exit_codes.FINISHED or not owns_run  # Slurm, which may not even answer, adds nothing
    job = None if is_clear else _job(assignment)
    restart = allocation.restart_count if allocation else 0
    evidence = Evidence(
        code=outcome.code,
        owns_run=owns_run,
        stop_request=read_stop_request(run),
        is_out_of_time=outcome.is_out_of_time,
        is_wedged=outcome.is_wedged,
        was_suspended=outcome.was_suspended,
        has_stacks=stacks.has_stacks(run, attempt, spec.resources.world_size),
        lost_nodes=[*outcome.lost_nodes, *outcome.avoided_nodes],
        now=time.time(),
        lead_s=spec.slurm.signal_lead_s,
        restart=restart,
        job=job,
    )
    if evidence.is_for_accounting:
        evidence = replace(evidence, accounted_as=_accounted_end(assignment, ledger))
    if outcome.code in (exit_codes.FINISHED, exit_codes.STOPPED) or job is None:
        return evidence
    lost = [node for node, state in client.node_states(assignment.environ, assignment.nodes).items() if is_lost(state)]
    return replace(evidence, lost_nodes=sorted({*evidence.lost_nodes, *lost}))


def _job(assignment: Assignment) -> JobRecord | None:
    """Return what Slurm knows of the job now, if it answers."""
    if assignment.allocation is None:
        return None
    try:
        return client.job(assignment.allocation.job_id, assignment.environ)
    except (ConfigError, SlurmUnavailableError):
        return None


def _accounted_end(assignment: Assignment, ledger: Ledger) -> str:
    return "" if ledger.newest is None else accounted_end(ledger.newest, ledger, assignment.environ)


def _write_down_hang(assignment: Assignment, attempt: int, failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Put all ranks' stacks into one file, and write down whose fault it was."""
    run, world_size = assignment.run, assignment.spec.resources.world_size
    stands = stacks.read_stands(run, attempt, world_size)
    bereft = {failure.rank for failure in failures if failure.is_secondary}
    found = stacks.laggard(stands, world_size, bereft=bereft)
    path = run.stacks(attempt)
    nodes = {stand.rank: assignment.node_of(stand.rank) or "this machine" for stand in stands}
    texts = [f"=== rank {stand.rank} on {nodes[stand.rank]}: {stand.place}\n{stand.stacks}\n" for stand in stands]
    with _told_where_the_disk_is_full():
        make_directories(path.parent)
        replace_text(path, "".join(texts))
    rank, stands_how = found if found is not None else (-1, "all wait for each other: look at the network between them")
    node = assignment.node_of(rank)
    who = "" if found is None else f"rank {rank}{f' on {node}' if node else ''} "
    phase = allowed_phase(run, attempt)
    failure = WorkerFailure(
        rank=rank,
        host=node or "",
        at=time.time(),
        step=0,
        exception=f"{_stood_still(assignment, phase)}; {who}{stands_how}; all stacks: {path}",
        log=str(run.rank_log(attempt, max(rank, 0))),
        phase=phase,
    )
    with _told_where_the_disk_is_full():
        write_failure(run.rank_error(attempt, max(rank, 0)), failure)
    return failure


def _stood_still(assignment: Assignment, phase: Phase) -> str:
    restart = assignment.spec.restart
    if phase == "building":
        return f"the recipe was not built within {restart.build_timeout_s} s"
    return f"no rank moved for {restart.hang_timeout_s} s"


def _failed_nodes(
    assignment: Assignment, cause: Cause, failure: WorkerFailure | None, evidence: Evidence
) -> tuple[str, ...]:
    """Return the nodes whose failure it may have been. An exception of the user's code is no node's fault."""
    if cause == Cause.NODE_FAILED:
        return tuple(evidence.lost_nodes)
    if failure is None or cause not in {Cause.HANG, Cause.WORKER_CRASHED}:
        return ()
    is_hang_of_node = cause == Cause.HANG and failure.phase != "building"
    is_nodes = is_hang_of_node or failure.signal is not None or failure.is_hardware
    node = assignment.node_of(failure.rank) if failure.rank >= 0 else None
    return (node,) if is_nodes and node is not None else ()


def _bad_nodes(
    assignment: Assignment, attempts: Sequence[Attempt], attempt: int, failed_nodes: Sequence[str]
) -> list[str]:
    """Return the nodes of this job that have failed too often, the attempt that has just ended included."""
    now = time.time()
    told = [
        replace(one, failed_nodes=tuple(failed_nodes), ended_at=now) if one.attempt == attempt else one
        for one in attempts
    ]
    bad = requeue.bad_nodes(told, assignment.spec.restart, now=now)
    return [node for node in bad if node in assignment.nodes]


def _reason(cause: Cause, outcome: Outcome, failure: WorkerFailure | None, decision: Decision) -> str:
    told = outcome.reason or _told(cause, outcome, failure)
    return "; ".join(part for part in (told, decision.why) if part)


def _told(cause: Cause, outcome: Outcome, failure: WorkerFailure | None) -> str:
    if cause in {Cause.FINISHED, Cause.STOP_ASKED}:
        return ""
    if cause in {Cause.WORKER_CRASHED, Cause.HANG, Cause.REFUSED, Cause.DIVERGED} and failure is not None:
        if failure.is_secondary:
            return f"processes died without a word; rank {failure.rank} on {failure.host} lost the connection to them"
        is_plain = failure.is_input_error or failure.is_diverged or failure.rank < 0 or cause == Cause.HANG
        where = f" on {failure.host}" if failure.host else ""
        return failure.exception if is_plain else f"rank {failure.rank}{where}: {failure.exception}"
    if cause == Cause.WORKER_CRASHED:
        return silent_end(outcome.code, outcome.step_code)
    return {
        Cause.CANCELLED: "cancelled by the user",
        Cause.FENCED: "another attempt has taken the run over",
        Cause.REQUEUE_ASKED: "told to make room",
        Cause.PREEMPTED: "preempted",
        Cause.TIME_LIMIT: "the job's time was over",
        Cause.NODE_FAILED: f"lost {', '.join(outcome.lost_nodes) or 'a node'}",
        Cause.HANG: "nothing was heard of the workers for long",
        Cause.SUSPENDED: "the job was suspended for longer than `restart.hang_timeout_s`, and the workers had to begin again",
        Cause.UNEXPLAINED: "told to leave before anybody could listen" if outcome.was_told else _ENDED_EARLY,
    }.get(cause, cause)


# --- the way back into the queue -------------------------------------------------------------------------------------


def leave(assignment: Assignment, conclusion: Conclusion) -> None:
    """Do as was decided, now that no worker is left: put the job back into the queue, or let it end."""
    decision, allocation = conclusion.decision, assignment.allocation
    if allocation is None or not decision.next:
        if conclusion.reason:
            sys.stderr.write(f"ended: {conclusion.reason}\n")
        return
    sys.stderr.write(f"note: {conclusion.reason}; the run goes on in another job ({decision.next})\n")
    try:
        _go_patiently(assignment, conclusion)
    except DdpHpcError as error:
        _end_here(assignment, conclusion, f"{conclusion.reason}; it could not be put back into the queue: {error}")


def _go_patiently(assignment: Assignment, conclusion: Conclusion) -> None:
    """Go, again and again while Slurm does not answer: its controller may be restarting, and ends no job meanwhile."""
    deadline, is_told = time.monotonic() + SLURM_PATIENCE_S, False
    while True:
        try:
            return _go(assignment, conclusion)
        except SlurmUnavailableError as error:
            if time.monotonic() >= deadline:
                raise
            if not is_told:
                sys.stderr.write(f"note: waiting for Slurm: {error}\n")
            is_told = True
            time.sleep(2.0)


def _go(assignment: Assignment, conclusion: Conclusion) -> None:
    decision, allocation = conclusion.decision, assignment.allocation
    assert allocation is not None  # noqa: S101  `leave` looked
    ledger = Ledger.read(assignment.run)
    is_back, cause = _ask_again(assignment, ledger)
    if cause is not None:
        _end_here(assignment, conclusion, ENDED_BY_USER[cause], cause=cause)
        return
    match decision.next:
        case Next.SUCCESSOR if not is_back:
            options = [f"--dependency=afterany:{allocation.job_id}"]
            if excluded := _excluded(assignment, ledger, decision.exclude):
                options.append(f"--exclude={excluded}")
            _note(assignment, conclusion, client.submit(assignment.run.job_script, assignment.environ, options))
        case Next.REQUEUE if not is_back:
            _note(assignment, conclusion, allocation.job_id)
            _requeue(assignment, ledger)
            _exclude(assignment, ledger, decision.exclude)
        case Next.SLURM | Next.REQUEUE | Next.SUCCESSOR:  # Slurm has put it back by itself
            _note(assignment, conclusion, allocation.job_id)
            _exclude(assignment, ledger, decision.exclude)


def _requeue(assignment: Assignment, ledger: Ledger) -> None:
    """Put the job back; one that is back already, of an order whose answer was lost, or by Slurm itself, is not refused."""
    allocation = assignment.allocation
    assert allocation is not None  # noqa: S101  `leave` looked
    try:
        client.requeue(allocation.scontrol_id, assignment.environ)
    except ConfigError:
        if not _ask_again(assignment, ledger)[0]:
            raise


def _ask_again(assignment: Assignment, ledger: Ledger) -> tuple[bool, Cause | None]:
    """Ask a last time: whether the job is back in the queue already, and whether the user has ended it meanwhile.

    `scontrol requeue` would call a job back that was cancelled, and end one that Slurm has started again elsewhere.
    """
    allocation, job, noted = assignment.allocation, _job(assignment), read_queued_job(assignment.run)
    if allocation is None:
        return False, None
    if noted is not None and noted.job_id == allocation.job_id and noted.cancelled_at is not None:
        return False, Cause.CANCELLED
    if job is not None and (job.restarts or 0) > allocation.restart_count:
        return True, None
    if read_stop_request(assignment.run) == "end":
        return False, Cause.STOP_ASKED
    if job is None or not is_ending(job):
        return False, None
    said = "" if job.preempted_at is None else _accounted_end(assignment, ledger)
    return False, Cause.CANCELLED if is_cancelled(job, said) else None


def _end_here(assignment: Assignment, conclusion: Conclusion, reason: str, *, cause: Cause | None = None) -> None:
    """Write down that nothing follows after all; `cause` where the user wanted it so."""
    sys.stderr.write(f"note: {reason}\n")
    noted = Ledger.read(assignment.run).attempt(conclusion.attempt)
    end = End(
        cause=cause or conclusion.cause,
        last_step=noted.last_step if noted else None,
        failed_nodes=noted.failed_nodes if noted else (),
    )
    record_end(
        assignment.run,
        attempt=conclusion.attempt,
        ending=requeue.TABLE[cause].ending if cause else conclusion.decision.ending,
        exit_code=conclusion.exit_code,
        reason=reason,
        end=end,
    )


def _note(assignment: Assignment, conclusion: Conclusion, job_id: str) -> None:
    """Note the job that goes on, as `submit` notes its own."""
    noted = read_queued_job(assignment.run)
    since = noted.since if noted else conclusion.attempt
    job = QueuedJob(job_id=job_id, attempt=conclusion.attempt + 1, at=time.time(), since=since)
    with _told_where_the_disk_is_full():
        write_queued_job(assignment.run, job)


def _excluded(assignment: Assignment, ledger: Ledger, lost: Sequence[str]) -> str:
    """Return the list of nodes that the next job should not get: the user's, and as many bad ones as can be spared."""
    return ",".join(filter(None, [assignment.spec.slurm.exclude, *sorted(nodes_to_spare(assignment, ledger, lost))]))


def _exclude(assignment: Assignment, ledger: Ledger, nodes: Sequence[str]) -> None:
    """Have the job come back on other nodes: Slurm takes that only from when it has begun to end this start of it.

    The list is made anew each time a node has ever failed, so that what is forgotten, or needed after all, is let in again.
    """
    allocation = assignment.allocation
    has_failed = nodes or any(attempt.failed_nodes for attempt in ledger.attempts)
    if allocation is None or not has_failed:
        return
    text = _excluded(assignment, ledger, nodes)
    deadline = time.monotonic() + EXCLUDE_PATIENCE_S
    while time.monotonic() < deadline:
        with suppress(ConfigError, SlurmUnavailableError):
            client.update(allocation.scontrol_id, assignment.environ, ExcNodeList=text)
            if text:
                sys.stderr.write(f"note: the job will not get {text} again\n")
            return
        time.sleep(0.1)
