"""Which nodes the end of an attempt counts against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from ddp_hpc import requeue
from ddp_hpc.failure_reports import WorkerFailure
from ddp_hpc.job.ending.causes import Evidence
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.ledger import Attempt, Cause


def failed_nodes(
    context: JobContext, cause: Cause, failure: WorkerFailure | None, evidence: Evidence
) -> tuple[str, ...]:
    """Return the nodes whose failure it may have been. An exception of the user's code counts against none."""
    if cause == Cause.NODE_FAILED:
        return tuple(evidence.lost_nodes)
    if failure is None or cause not in {Cause.HANG, Cause.WORKER_CRASHED}:
        return ()
    is_hang_of_node = cause == Cause.HANG and failure.phase != "building"
    is_nodes = is_hang_of_node or failure.signal is not None or failure.is_hardware
    node = context.node_of(failure.rank) if failure.rank >= 0 else None
    return (node,) if is_nodes and node is not None else ()


def refusing_nodes(context: JobContext, failure: WorkerFailure | None) -> tuple[str, ...]:
    """Return the node that lacks what the others have, such as a GPU, a mount or an image."""
    if failure is None:
        return ()
    node = context.node_of(failure.rank) if failure.rank >= 0 else failure.host
    return (node,) if node in context.nodes else ()


def bad_nodes(context: JobContext, attempts: Sequence[Attempt], attempt: int, failed_nodes: Sequence[str]) -> list[str]:
    """Return the nodes of this job that have failed too often, the attempt that has just ended included."""
    now = time.time()
    completed = [
        replace(one, failed_nodes=tuple(failed_nodes), ended_at=now) if one.attempt == attempt else one
        for one in attempts
    ]
    bad = requeue.bad_nodes(completed, context.spec.restart, now=now)
    return [node for node in bad if node in context.nodes]
