"""What came before this start of a job: rivals for the run, attempts that died without a word, nodes that failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from ddp_hpc import checkpoint_store, requeue
from ddp_hpc.errors import DdpHpcError, UnreadableError
from ddp_hpc.job import causes
from ddp_hpc.job.assignment import Assignment
from ddp_hpc.ledger import Attempt, Cause, End, Ending, Ledger, Next, record_end
from ddp_hpc.patience import patiently
from ddp_hpc.records import newest_committed
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client, states
from ddp_hpc.slurm.allocation import Allocation
from ddp_hpc.slurm.nodes import nodes_to_exclude
from ddp_hpc.slurm.queries import is_lost

LISTING_PATIENCE_S = 10.0
"""How long to ask a file system which checkpoints there are, before the records are believed."""


def newest_step(run: RunDir, ledger: Ledger) -> int:
    """Return the step of the newest checkpoint, 0 without one; of a file system that does not say, what the records say."""
    try:
        steps = patiently(
            str(run.checkpoints), lambda: checkpoint_store.committed_steps(run), patience_s=LISTING_PATIENCE_S
        )
    except UnreadableError as error:
        sys.stderr.write(f"note: {error} What the records say of the newest checkpoint is taken instead.\n")
        return newest_committed(run, ledger)
    return steps[-1] if steps else 0


OLD_S = 24 * 3600.0
"""A job that ended so long before the first attempt of ours is not ours: clusters begin anew to number their jobs."""


def is_anothers(newest: Attempt, allocation: Allocation, environ: Mapping[str, str]) -> bool:
    """Tell whether another job works on the run: file systems that lock each node by itself do not say."""
    if newest.ending is not None or newest.cluster != "slurm" or newest.job_id == allocation.job_id:
        return False
    try:
        job = client.job(newest.job_id, environ)
    except DdpHpcError:
        return False
    return job is not None and states.parse_state(job.state) in {"running", "suspended", "ending"}


def bury(run: RunDir, environ: Mapping[str, str]) -> None:
    """Write down for the newest attempt, if it died without a word, what Slurm knows of its end."""
    ledger = Ledger.read(run)
    newest = ledger.newest
    if newest is None or newest.ending is not None or newest.cluster != "slurm":
        return
    said = accounted_end(newest, ledger, environ)
    cause = causes.BY_STATE.get(states.parse_state(said), Cause.UNEXPLAINED)
    failed = _failed_nodes(newest, environ) if cause == Cause.NODE_FAILED else ()
    reason = f"ended without a word; Slurm says {said}" if said else "ended without a word"
    end = End(cause=cause, last_step=newest_step(run, ledger), next=Next.SLURM, failed_nodes=failed)
    record_end(run, attempt=newest.attempt, ending=Ending.FAILED, exit_code=-9, reason=reason, end=end)
    sys.stderr.write(f"note: attempt {newest.attempt} on {newest.host} {reason}\n")


def accounted_end(attempt: Attempt, ledger: Ledger, environ: Mapping[str, str]) -> str:
    """Return the state in which accounting saw this start of the job end; empty where it does not say."""
    first = min(one.started_at for one in [*ledger.attempts, attempt] if one.job_id == attempt.job_id)
    starts = [
        start
        for start in client.accounting([attempt.job_id], environ)
        if start.ends_at is None or start.ends_at > first - OLD_S  # else an older job had the same number
    ]
    if len(starts) > attempt.restart and states.has_ended(starts[attempt.restart].state):
        return starts[attempt.restart].state
    if len(starts) > attempt.restart and states.parse_state(starts[attempt.restart].state) == "requeued":
        return starts[attempt.restart].state
    return ""


def _failed_nodes(attempt: Attempt, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that Slurm takes for lost; or else the first, for with any other the supervisor had its word."""
    found = client.node_states(environ, attempt.nodes)
    return tuple(node for node, state in found.items() if is_lost(state)) or attempt.nodes[:1]


def nodes_to_avoid(assignment: Assignment, ledger: Ledger) -> tuple[str, ...]:
    """Return the nodes of this job that have failed too often, as far as the cluster has enough others."""
    spared = set(nodes_to_spare(assignment, ledger))
    return tuple(node for node in assignment.nodes if node in spared)


def nodes_to_spare(assignment: Assignment, ledger: Ledger, lost: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the nodes that a job of this run should not get: `lost`, and those that failed too often.

    Where the partition has too few others, some are let in again, and that is said.
    """
    allocation = assignment.allocation
    bad = requeue.bad_nodes(ledger.attempts, assignment.spec.restart, now=time.time())
    exclusions = nodes_to_exclude(
        [*sorted({*lost} - {*bad}), *bad],
        assignment.spec,
        assignment.environ,
        partition=allocation.partition if allocation else None,
    )
    if exclusions.detail:
        sys.stderr.write(f"note: {exclusions.detail}\n")
    return exclusions.excluded
