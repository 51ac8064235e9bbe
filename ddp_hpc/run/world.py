"""How many workers an attempt has, and how they are spread over nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class World:
    """Nodes with the same number of workers each; ranks fill one node after the other.

    A spec says which world was asked for (`ResourcesSpec.world`), a job which one was given (`JobContext.world`).
    """

    num_nodes: int
    workers_per_node: int

    @property
    def world_size(self) -> int:
        """Workers on all nodes."""
        return self.num_nodes * self.workers_per_node

    def node_rank_of(self, rank: int) -> int:
        """Return the rank of the node that a worker runs on."""
        return rank // self.workers_per_node
