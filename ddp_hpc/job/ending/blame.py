"""Which nodes the end of an attempt counts against, and which failure came first."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ddp_hpc.base import exit_codes
from ddp_hpc.job.ending.causes import Evidence
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.run import requeue
from ddp_hpc.run.run_dir.differences import Difference, is_same_difference
from ddp_hpc.run.run_dir.error_fingerprint import fingerprint
from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ending, RootFailure
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.spec.launch import RestartSpec
from ddp_hpc.run.world import World


def failed_nodes(
    cause: Cause, context: JobContext, evidence: Evidence, failure: WorkerFailure | None
) -> tuple[str, ...]:
    """Return the nodes whose failure it may have been. An exception of the user's code counts against none, nor does a lost connection."""
    match cause:
        case Cause.NODE_FAILED if evidence.outcome.avoided_nodes:
            # A node that is avoided for its earlier failures has not failed again. If this counted, it would be avoided for ever.
            before = requeue.bad_nodes(evidence.ledger.attempts, context.spec.restart, now=time.time())
            return tuple(node for node in evidence.lost_nodes if node not in before)
        case Cause.NODE_FAILED:
            return tuple(evidence.lost_nodes)
        case Cause.RANKS_DIFFER if evidence.differs_as is None:
            return odd_ranks_nodes(evidence.difference, context.nodes)
        case Cause.HANG | Cause.WORKER_CRASHED if failure is not None:
            is_refusal = evidence.outcome.code == exit_codes.REFUSED  # its node lacks what others have, such as a mount
            is_hang_of_node = cause == Cause.HANG and failure.phase != "building"
            is_own = failure.is_secondary or failure.is_code_error or failure.memory_ran_out
            is_crash = failure.signal is not None and not is_own
            host = failure.host if is_refusal else None
            node = context.node_of(failure.rank) if failure.rank >= 0 else host
            is_nodes = is_refusal or is_hang_of_node or is_crash or failure.is_hardware
            return (node,) if is_nodes and node in context.nodes else ()
    return ()


def unreached_nodes(cause: Cause, network: NetworkFindings | None, nodes: Collection[str]) -> tuple[str, ...]:
    """Return the nodes that no other node reaches, as a probe found. Of a pair of nodes, neither is proved to be the bad one."""
    if network is None or cause not in {Cause.HANG, Cause.WORKER_CRASHED}:
        return ()
    return tuple(node for node in network.bad_nodes if node in nodes)


def nodes_to_avoid(
    attempts: Sequence[Attempt], attempt: int, cause: Cause, failed_nodes: Sequence[str], policy: RestartSpec
) -> list[str]:
    """Return the nodes that have failed too often, the attempt that has just ended included."""
    now, failed = time.time(), tuple(failed_nodes)
    completed = [
        replace(one, ending=Ending.FAILED, ended_at=now, cause=cause, failed_nodes=failed)
        if one.attempt == attempt
        else one
        for one in attempts
    ]
    return requeue.bad_nodes(completed, policy, now=now)


def root_failure(cause: Cause, failures: Sequence[WorkerFailure], *, hosts: Sequence[str]) -> RootFailure:
    """Return the failure that came first; without fields where no worker reported one.

    A sample that is proved to be wrong is the root, whatever other ranks report: their clocks may differ, and what they met may
    follow from this. Where several are wrong at once, or another rank reports what may pass and does not only follow, something
    that they share may be the reason (a file server that is away), so it may pass.
    """
    own = [failure for failure in failures if not (failure.is_secondary or failure.is_hang)]
    if cause != Cause.WORKER_CRASHED or not own:
        return RootFailure()
    proved = [failure for failure in own if failure.entity and not failure.may_recover]
    first = (proved or own)[0]
    num_entities = len({(failure.entity, failure.entity_version) for failure in proved})
    kind = first.exception_type or f"signal {first.signal}, exit code {first.exit_code}"
    return RootFailure(
        fingerprint=fingerprint(kind, first.exception, first.place, hosts=(*hosts, first.host)),
        entity=first.entity,
        entity_version=first.entity_version,
        may_recover=num_entities != 1 or len(proved) < len(own),
        failed_step=None if first.of_script else first.step,
    )


# --- of ranks that differ ----------------------------------------------------------------------------------------------


def odd_ranks_nodes(difference: Difference | None, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of the ranks that were wrong; `nodes` are the attempt's, rank zero's first."""
    if difference is None or not nodes:
        return ()
    world = World(num_nodes=len(nodes), workers_per_node=max(1, len(difference.digests) // len(nodes)))
    places = (world.node_rank_of(rank) for rank in difference.odd_ranks)
    return tuple(dict.fromkeys(nodes[place] for place in places if place < len(nodes)))


def earlier_same_difference(differences: Sequence[Difference], attempts: Sequence[Attempt], attempt: int) -> int | None:
    """Return the earlier of these attempts in which each rank had the same values after the same step; None without one."""
    newest = next((one for one in differences if one.attempt == attempt), None)
    counted = {one.attempt for one in attempts} - {attempt}
    same = [one.attempt for one in differences if newest and one.attempt in counted and is_same_difference(one, newest)]
    return same[-1] if same else None


def corrected_attempts(attempts: Sequence[Attempt], differences: Sequence[Difference]) -> list[Attempt]:
    """Return the attempts of which the records show by now that they failed on other nodes than the ledger says, or on none.

    A supervisor that ends before it has corrected the ledger leaves that to the next one.
    """
    by_attempt = {one.attempt: one for one in differences}
    found = [
        replace(one, failed_nodes=_corrected_nodes(by_attempt[one.attempt], one, differences))
        for one in attempts
        if one.cause == Cause.RANKS_DIFFER and one.attempt in by_attempt
    ]
    return [one for one in found if one not in attempts]


def _corrected_nodes(own: Difference, attempt: Attempt, differences: Sequence[Difference]) -> tuple[str, ...]:
    if any(is_same_difference(one, own) for one in differences if one.attempt != own.attempt):
        return ()
    return odd_ranks_nodes(own, attempt.nodes) if own.told_by == "repetition" else attempt.failed_nodes
