"""Why nodes are out of service, by the reasons that Slurm shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_hpc.cluster.slurm.queries import NodeState, takes_jobs

PREFIXES = {
    "[node_problem]": "the node has failed a check of hardware or system; the administrators must repair it",
    "[user_problem]": "a user's processes made the node unusable, for instance with a full disk or memory; Slurm's reason says which",
}
"""How some sites' checks begin a reason (Soperator of Nebius writes these two) -> what it means."""
_SILENT = "`*` means that the node's slurmd does not answer the controller: the node is down, or its network is"
_OTHERS = "this reason is the text of an administrator or of Slurm; ask your cluster's support"


def groups(nodes: Sequence[NodeState]) -> list[list[NodeState]]:
    """Return the nodes that take no jobs by state and reason, the largest group first: hundreds may be down for one reason."""
    found: dict[tuple[str, str], list[NodeState]] = {}
    for one in nodes:
        if not takes_jobs(one.state):
            found.setdefault((one.state, one.reason), []).append(one)
    return sorted(found.values(), key=len, reverse=True)


def meaning(reason: str, state: str = "") -> str:
    """Return what a reason means; without one, what the state does. Empty where neither says anything."""
    if not reason:
        return _SILENT if state.endswith("*") else ""
    return next((text for prefix, text in PREFIXES.items() if reason.lower().startswith(prefix)), _OTHERS)
