"""Why nodes are out of service, by the reasons that Slurm shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.cluster.slurm.queries import NodeState, takes_jobs

PREFIXES = {
    "[node_problem]": "the node has failed a check of hardware or system; the administrators must repair it",
    "[user_problem]": "a user's processes made the node unusable, for instance with a full disk or memory; Slurm's reason says which",
}
"""How some sites' checks begin a reason (Soperator of Nebius writes these two) -> what it means."""
_SILENT = "`*` means that the node's slurmd does not answer the controller: the node is down, or its network is"
_OTHERS = "this reason is the text of an administrator or of Slurm; ask your cluster's support"


@dataclass(frozen=True, kw_only=True)
class OutOfService:
    """A node that takes no jobs."""

    node: str
    state: str
    reason: str
    means: str


def out_of_service(nodes: Sequence[NodeState]) -> list[OutOfService]:
    """Return the nodes that take no jobs, and what their reasons mean."""
    return [
        OutOfService(node=one.node, state=one.state, reason=one.reason, means=meaning(one.reason, one.state))
        for one in nodes
        if not takes_jobs(one.state)
    ]


def groups(bad: Sequence[OutOfService]) -> list[list[OutOfService]]:
    """Return the nodes by state and reason, the largest group first: of a site of 5,000 nodes, hundreds are down for one reason."""
    found: dict[tuple[str, str], list[OutOfService]] = {}
    for one in bad:
        found.setdefault((one.state, one.reason), []).append(one)
    return sorted(found.values(), key=len, reverse=True)


def meaning(reason: str, state: str = "") -> str:
    """Return what a reason means; without one, what the state does. Empty where neither says anything."""
    if not reason:
        return _SILENT if state.endswith("*") else ""
    return next((text for prefix, text in PREFIXES.items() if reason.lower().startswith(prefix)), _OTHERS)
