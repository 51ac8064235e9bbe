"""Which nodes a difference between ranks counts against, and whether other nodes would mend it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_hpc.run.run_dir.differences import Difference, is_same_again
from ddp_hpc.run.run_dir.ledger import Attempt, Cause
from ddp_hpc.run.world import World


def nodes_of(difference: Difference | None, nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes of the ranks that were wrong; `nodes` are the attempt's, rank zero's first."""
    if difference is None or not nodes:
        return ()
    world = World(num_nodes=len(nodes), workers_per_node=max(1, len(difference.digests) // len(nodes)))
    places = (world.node_rank_of(rank) for rank in difference.odd_ranks)
    return tuple(dict.fromkeys(nodes[place] for place in places if place < len(nodes)))


def same_again(differences: Sequence[Difference], attempts: Sequence[Attempt], attempt: int) -> int | None:
    """Return the earlier of these attempts in which each rank had the same values after the same step; None without one."""
    newest = next((one for one in differences if one.attempt == attempt), None)
    counted = {one.attempt for one in attempts} - {attempt}
    same = [one.attempt for one in differences if newest and one.attempt in counted and is_same_again(one, newest)]
    return same[-1] if same else None


def corrected(attempts: Sequence[Attempt], differences: Sequence[Difference]) -> list[Attempt]:
    """Return the attempts of which the records show by now that they failed on other nodes than the ledger says, or on none.

    A supervisor that ends before it has corrected the ledger leaves that to the next one.
    """
    by_attempt = {one.attempt: one for one in differences}
    found = [
        replace(one, end=replace(one.end, failed_nodes=_nodes_now_known(by_attempt[one.attempt], one, differences)))
        for one in attempts
        if one.end and one.end.cause == Cause.RANKS_DIFFER and one.attempt in by_attempt
    ]
    return [one for one in found if one not in attempts]


def _nodes_now_known(own: Difference, attempt: Attempt, differences: Sequence[Difference]) -> tuple[str, ...]:
    if any(is_same_again(one, own) for one in differences if one.attempt != own.attempt):
        return ()
    return nodes_of(own, attempt.nodes) if own.told_by == "repetition" else attempt.failed_nodes
