"""The record of a probe of the network between the nodes of a job: which pairs of nodes do not reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_hpc.base.names import shorten_names
from ddp_hpc.base.record import try_read_record, write_record
from ddp_hpc.run.run_dir.paths import RunDir

Fault = Literal["nothing passes", "one way", "large packets", "TCP", "refused", "loss", "little loss", "no answer"]
"""What is wrong between two nodes. Of all but the last two, workers cannot be expected to make progress."""
_MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True)
class PairFault:
    """Two nodes between which the network does not carry."""

    nodes: tuple[str, str]
    """Where packets pass one way only or are lost one way only: the sender first."""
    fault: Fault
    loss: float = 0.0
    """The share of packets that did not arrive, of those sent by the first node to the second; 0 where that is not known."""

    @property
    def words(self) -> str:
        """Say it in plain English."""
        one, other = self.nodes
        return {
            "nothing passes": f"no packet passes between {one} and {other}",
            "one way": f"nothing that {one} sends arrives at {other}, while packets pass the other way",
            "large packets": f"large packets from {one} do not arrive at {other}, small ones do (check the MTU of all nodes and switches)",
            "TCP": f"datagrams pass between {one} and {other}, but TCP connections fail (check the firewalls)",
            "refused": f"{other} refuses connections from {one} (check the firewalls)",
            "loss": f"{self.loss:.0%} of the packets from {one} to {other} are lost",
            "no answer": f"nothing is known of the link between {one} and {other}, as a process of the probe was too slow",
            "little loss": f"{self.loss:.1%} of the packets from {one} to {other} are lost",
        }[self.fault]


@dataclass(frozen=True, kw_only=True)
class LinkMetrics:
    """What one node measured of its link to another."""

    sender: str
    receiver: str
    mb_per_s: float
    """How fast its bytes arrived there, in 10^6 bytes a second."""
    ahead_s: float
    """How far the clock of the receiver is ahead of the sender's."""
    trip_s: float
    """How long the question for the time and its answer took; the clocks' difference is wrong by half of it at most."""


@dataclass(frozen=True, kw_only=True)
class NetworkFindings:
    """What a probe found."""

    at: float
    seconds: float
    address: str
    """Where the ranks met: the probe goes over the network of this address."""
    num_nodes: int
    num_pairs: int
    """How many pairs were probed to the end."""
    bad_nodes: tuple[str, ...] = ()
    """Nodes that no other node reaches, while others reach each other."""
    off_network: tuple[str, ...] = ()
    """Those of `bad_nodes` that have no address on that network."""
    pairs: tuple[PairFault, ...] = ()
    """Pairs that do not carry, those of `bad_nodes` included."""
    lossy: tuple[PairFault, ...] = ()
    """Pairs that carry, but lose some packets."""
    unknown: tuple[PairFault, ...] = ()
    """Pairs of which nothing is known: a process stood still for some seconds."""
    silent: tuple[str, ...] = ()
    """Nodes that did not answer over Slurm's network: of their links nothing is known."""
    problem: str = ""
    """Why nothing is known at all."""
    paces: tuple[LinkMetrics, ...] = ()
    """How fast the links are, and how far apart the clocks; empty where that was not asked."""

    @property
    def is_faulty(self) -> bool:
        """Whether a node or a pair of nodes is proved not to carry."""
        return bool(self.bad_nodes or self.pairs)

    def is_at_fault(self, node: str | None) -> bool:
        """Tell whether a link of this node is proved not to carry."""
        return node in self.bad_nodes or any(node in pair.nodes for pair in self.pairs)

    @property
    def carries_everywhere(self) -> bool:
        """Whether all pairs that were probed carry, and each node was."""
        return bool(self.num_pairs) and not (self.is_faulty or self.silent or self.unknown or self.problem)

    @property
    def unexplained_pairs(self) -> Sequence[PairFault]:
        """The pairs that do not carry and are not explained by a bad node."""
        bad = {*self.bad_nodes}
        return [pair for pair in self.pairs if bad.isdisjoint(pair.nodes)]

    @property
    def culprits_text(self) -> str:
        """Name the bad nodes, or the pairs: `node2`, `node1 - node3`."""
        pairs = [" - ".join(pair.nodes) for pair in self.unexplained_pairs]
        return shorten_names([*self.bad_nodes, *pairs], len(self.bad_nodes) + _MOST_NAMED)

    @property
    def words(self) -> str:
        """Say in a sentence or two what was found."""
        if self.problem:
            return f"the network between the nodes could not be probed: {self.problem}"
        parts = [*self._node_sentences(), *self._pair_sentences()]
        if not parts and self.num_pairs:
            num = self.num_nodes - len(self.silent)
            all_pairs = f"all {num} nodes that were probed" if not self.unknown else f"{self.num_pairs} pairs of nodes"
            parts = [f"{all_pairs} reach each other on the network of {self.address}"]
        parts += [_pairs_text(pairs) for pairs in (self.lossy, self.unknown) if pairs]
        if self.silent:
            parts.append(
                f"{shorten_names(self.silent, _MOST_NAMED)} did not answer in time over Slurm's network, so nothing is known of their links"
            )
        return "; ".join(parts)

    def _node_sentences(self) -> list[str]:
        said = []
        for node in self.bad_nodes:
            if node in self.off_network:
                said.append(
                    f"{node} has no address of its own on the network of {self.address} (its interface is down, or has lost its address, or has another node's)"
                )
                continue
            faults = {pair.fault for pair in self.pairs if node in pair.nodes}
            senders = {pair.nodes[0] for pair in self.pairs if node in pair.nodes}
            how = "no packet passes"
            if faults == {"one way"} and senders == {node}:
                how = "nothing that it sends arrives at any of them"
            elif faults == {"one way"} and node not in senders:
                how = "nothing that they send arrives at it"
            elif faults != {"nothing passes"}:
                how = "; ".join(sorted({pair.words for pair in self.pairs if node in pair.nodes})[:2])
            said.append(f"{node} does not reach the other nodes on the network of {self.address}: {how}")
        return said

    def _pair_sentences(self) -> list[str]:
        pairs = self.unexplained_pairs
        if pairs and not self.bad_nodes and len(pairs) == self.num_pairs and self.num_nodes > 2:
            return [
                f"no two of the {self.num_nodes} nodes reach each other on the network of {self.address}: {pairs[0].words}, and so on"
            ]
        return [f"on the network of {self.address}, {_pairs_text(pairs)}"] if pairs else []


def _pairs_text(pairs: Sequence[PairFault]) -> str:
    return shorten_names([pair.words for pair in pairs], _MOST_NAMED, between="; ")


def write_network(run: RunDir, attempt: int, findings: NetworkFindings) -> None:
    """Write what a probe found at the end of an attempt."""
    write_record(run.network(attempt), findings, indent=1)


def read_network(run: RunDir, attempt: int) -> NetworkFindings | None:
    """Return what a probe found; None where there was none, or its record cannot be read."""
    return try_read_record(run.network(attempt), NetworkFindings)
