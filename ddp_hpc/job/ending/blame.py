"""Which nodes the end of an attempt counts against."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ddp_hpc.job.ending.causes import Evidence
from ddp_hpc.run import requeue
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Attempt, Cause
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.spec.launch import RestartSpec

NodeOf = Callable[[int], str | None]
"""From a rank to the name of its node, where that is known."""


def failed_nodes(
    cause: Cause, failure: WorkerFailure | None, evidence: Evidence, *, node_of: NodeOf
) -> tuple[str, ...]:
    """Return the nodes whose failure it may have been. An exception of the user's code counts against none, nor does a lost connection."""
    if cause == Cause.NODE_FAILED:
        return tuple(evidence.lost_nodes)
    if failure is None or cause not in {Cause.HANG, Cause.WORKER_CRASHED}:
        return ()
    is_hang_of_node = cause == Cause.HANG and failure.phase != "building"
    is_crash = failure.signal is not None and not (failure.is_secondary or failure.is_code_error)
    is_nodes = is_hang_of_node or is_crash or failure.is_hardware
    node = node_of(failure.rank) if failure.rank >= 0 else None
    return (node,) if is_nodes and node is not None else ()


def unreached_nodes(cause: Cause, network: NetworkFindings | None, nodes: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that no other node reaches, as a probe found. Of a pair of nodes, neither is proved to be the bad one."""
    if network is None or cause not in {Cause.HANG, Cause.WORKER_CRASHED}:
        return ()
    return tuple(node for node in network.bad_nodes if node in nodes)


def refusing_nodes(failure: WorkerFailure | None, nodes: Collection[str], *, node_of: NodeOf) -> tuple[str, ...]:
    """Return the node that lacks what the others have, such as a GPU, a mount or an image."""
    if failure is None:
        return ()
    node = node_of(failure.rank) if failure.rank >= 0 else failure.host
    return (node,) if node is not None and node in nodes else ()


def bad_nodes(
    attempts: Sequence[Attempt], attempt: int, cause: Cause, failed_nodes: Sequence[str], policy: RestartSpec
) -> tuple[str, ...]:
    """Return the nodes that have failed too often, the attempt that has just ended included."""
    now = time.time()
    completed = [
        replace(one, cause=cause, failed_nodes=tuple(failed_nodes), ended_at=now) if one.attempt == attempt else one
        for one in attempts
    ]
    return tuple(requeue.bad_nodes(completed, policy, now=now))
