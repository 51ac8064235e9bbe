"""Why nodes are out of service, by the reasons that Slurm shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.slurm.queries import NodeState, takes_jobs

PREFIXES = {
    "[node_problem]": "the hardware or the system of the node has failed a check; its administrators repair it",
    "[user_problem]": "a user's processes left the node unusable, such as by a full disk or by memory; read the reason",
}
"""How some sites' checks begin a reason (Soperator of Nebius writes these two) -> what it means."""
_SILENT = "the `*` says that its slurmd does not answer the controller: the node is down, or cut off"
_OTHERS = "no known prefix; the text is an administrator's, or Slurm's own"


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


def meaning(reason: str, state: str = "") -> str:
    """Return what a reason means; without one, what the state does. Empty where neither says anything."""
    if not reason:
        return _SILENT if state.endswith("*") else ""
    return next((text for prefix, text in PREFIXES.items() if reason.lower().startswith(prefix)), _OTHERS)
