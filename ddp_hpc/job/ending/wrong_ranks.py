"""Which nodes a difference between ranks counts against, and whether other nodes would mend it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_hpc.run_dir.differences import Difference, is_same_again
from ddp_hpc.run_dir.ledger import Attempt, Cause
from ddp_hpc.world import World


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


def corrected(attempts: Sequence[Attempt], differences: Sequence[Difference], attempt: int) -> list[Attempt]:
    """Return the earlier attempts of which `attempt` has shown on which nodes they failed, or that it was no node."""
    again = same_again(differences, attempts, attempt)
    told = {one.attempt: one for one in differences if one.told_in == attempt != one.attempt}
    found = [
        replace(one, failed_nodes=() if one.attempt == again else nodes_of(told.get(one.attempt), one.nodes))
        for one in attempts
        if one.cause == Cause.RANKS_DIFFER and (one.attempt == again or one.attempt in told)
    ]
    return [one for one in found if one not in attempts]
