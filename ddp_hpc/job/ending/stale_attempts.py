"""What came before this start of a job: other jobs that use the run, attempts without a recorded end, failed nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from ddp_hpc import requeue
from ddp_hpc.errors import DdpHpcError
from ddp_hpc.job.ending import causes
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.ledger import Attempt, Cause, End, Ending, Ledger, Next, record_end
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import client, states
from ddp_hpc.slurm.allocation import Allocation
from ddp_hpc.slurm.nodes import nodes_to_exclude
from ddp_hpc.slurm.queries import is_lost
from ddp_hpc.workload.protocol import Workload

OLD_S = 24 * 3600.0
"""A job that ended so long before the run's first attempt is another one: job ids start again after MaxJobId
(slurm.conf(5))."""


def is_anothers(newest: Attempt, allocation: Allocation, environ: Mapping[str, str]) -> bool:
    """Ask Slurm whether another job uses the run: some file systems have locks that hold within one node only."""
    if newest.ending is not None or newest.cluster != "slurm" or newest.job_id == allocation.job_id:
        return False
    try:
        job = client.job(newest.job_id, environ)
    except DdpHpcError:
        return False
    return job is not None and states.parse_state(job.state) in {"running", "suspended", "ending"}


def close_stale(run: RunDir, workload: Workload, environ: Mapping[str, str]) -> None:
    """Record the end of the newest attempt by what Slurm knows of it, if its supervisor died before it could."""
    ledger = Ledger.read(run)
    newest = ledger.newest
    if newest is None or newest.ending is not None or newest.cluster != "slurm":
        return
    state = accounted_end(newest, ledger, environ)
    cause = causes.BY_STATE.get(states.parse_state(state), Cause.UNEXPLAINED)
    failed = _failed_nodes(newest, environ) if cause == Cause.NODE_FAILED else ()
    by_slurm = f"Slurm accounting says {state}" if state else "Slurm accounting does not say why"
    reason = f"ddp-hpc's supervisor process ended without recording why; {by_slurm}"
    end = End(cause=cause, last_step=workload.progress(run, ledger), next=Next.SLURM, failed_nodes=failed)
    record_end(run, attempt=newest.attempt, ending=Ending.FAILED, exit_code=-9, reason=reason, end=end)
    sys.stderr.write(f"note: attempt {newest.attempt} on {newest.host}: {reason}\n")


def accounted_end(attempt: Attempt, ledger: Ledger, environ: Mapping[str, str]) -> str:
    """Return the final state of this start of the job by accounting; empty where that is not known."""
    first = min(one.started_at for one in [*ledger.attempts, attempt] if one.job_id == attempt.job_id)
    starts = [
        start
        for start in client.accounting([attempt.job_id], environ)
        if start.ends_at is None or start.ends_at > first - OLD_S  # an older job had the same number
    ]
    if len(starts) > attempt.restart and states.has_ended(starts[attempt.restart].state):
        return starts[attempt.restart].state
    if len(starts) > attempt.restart and states.parse_state(starts[attempt.restart].state) == "requeued":
        return starts[attempt.restart].state
    return ""


def _failed_nodes(attempt: Attempt, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the nodes that are down by Slurm; else the first: had another failed, the supervisor would have recorded it."""
    found = client.node_states(environ, attempt.nodes)
    return tuple(node for node, state in found.items() if is_lost(state)) or attempt.nodes[:1]


def nodes_to_avoid(context: JobContext, ledger: Ledger) -> tuple[str, ...]:
    """Return the nodes of this job that have failed too often, as long as the partition has enough others."""
    spared = set(nodes_to_spare(context, ledger))
    return tuple(node for node in context.nodes if node in spared)


def nodes_to_spare(context: JobContext, ledger: Ledger, lost: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the nodes that a job of this run should not get: `lost`, and those that failed too often.

    Where the partition has too few others, some are allowed again, and the job's log says so.
    """
    allocation = context.allocation
    bad = requeue.bad_nodes(ledger.attempts, context.spec.restart, now=time.time())
    exclusions = nodes_to_exclude(
        [*sorted({*lost} - {*bad}), *bad],
        context.spec,
        context.environ,
        partition=allocation.partition if allocation else None,
    )
    if exclusions.detail:
        sys.stderr.write(f"note: {exclusions.detail}\n")
    return exclusions.excluded
