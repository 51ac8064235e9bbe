"""From what the nodes saw of each other to the node, or the pair of nodes, that the network does not carry. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network

from ddp_hpc.rendezvous.links.node import NUM_DATAGRAMS
from ddp_hpc.rendezvous.links.rounds import rounds_of
from ddp_hpc.run_dir.network import Fault, NetworkFindings, PairFault

Way = tuple[int, int]
"""From one node to another, by their numbers."""

MUCH_LOSS = 0.05
"""Of so many packets lost, TCP makes hardly any progress."""
LITTLE_LOSS = 0.005
_FEWEST_LOST = 2


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one node reported."""

    address: str = ""
    """On the workers' network; empty where it has none there."""
    network: str = ""
    """The subnet of that address."""
    tcp: Mapping[int, str] = field(default_factory=dict)
    """What became of its connections, by partner."""
    heard: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """How many small and large datagrams arrived, by sender."""
    num_dropped: int = 0
    is_whole: bool = False
    """Whether it reported to the end."""


def findings_of(
    nodes: Sequence[str], answers: Mapping[int, Answer], *, address: str, at: float, seconds: float
) -> NetworkFindings:
    """Return what the answers prove. `nodes` are the job's, in the order of their numbers."""
    off = off_network(answers, address)
    silent = [number for number in range(len(nodes)) if number not in off and not _is_whole(answers.get(number))]
    pairs: dict[tuple[int, int], PairFault | None] = {}
    for low, high in (pair for pairs_of_round in rounds_of(len(nodes)) for pair in pairs_of_round):
        if low not in silent and high not in silent and not {low, high} & off:
            pairs[low, high] = _fault(nodes, answers, low, high)
    bad_pairs = {pair for pair, fault in pairs.items() if fault is not None and fault.fault != "little loss"}
    bad = _bad_nodes(pairs.keys(), bad_pairs) | (off if len(off) < len(nodes) else set())
    return NetworkFindings(
        at=at,
        seconds=round(seconds, 1),
        address=address,
        num_nodes=len(nodes),
        num_pairs=len(pairs),
        bad_nodes=tuple(nodes[number] for number in sorted(bad)),
        off_network=tuple(nodes[number] for number in sorted(off)),
        pairs=tuple(fault for pair, fault in sorted(pairs.items()) if fault is not None and pair in bad_pairs),
        lossy=tuple(fault for pair, fault in sorted(pairs.items()) if fault is not None and pair not in bad_pairs),
        silent=tuple(nodes[number] for number in silent),
    )


def off_network(answers: Mapping[int, Answer], address: str) -> set[int]:
    """Return the nodes that have no address of their own on the workers' network.

    These are the nodes that said so, the nodes that listen at rank zero's address, and rank zero's node where its subnet is not that
    of `address`, which was its own when the ranks met. Of other nodes, a subnet proves nothing: routers may connect the
    subnets of several racks, each with many nodes.
    """
    off = {number for number, answer in answers.items() if answer.is_whole and not answer.address}
    zero = answers.get(0, Answer())
    if not zero.address or ip_address(zero.address.partition("%")[0]).is_loopback:  # then all are on this machine
        return off
    # A node of a cloned image, or one that may bind addresses that it does not have (ip_nonlocal_bind), listens at rank zero's.
    off |= {number for number, answer in answers.items() if number and answer.address == zero.address}
    is_elsewhere = bool(zero.network) and not _holds(zero.network, address)
    if is_elsewhere and any(_holds(answer.network, address) for answer in answers.values()):
        off.add(0)
    return off


def _holds(network: str, address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]) in ip_network(network)
    except ValueError:
        return False


def _is_whole(answer: Answer | None) -> bool:
    return answer is not None and answer.is_whole


@dataclass(frozen=True, kw_only=True)
class _Link:
    """What two nodes that both reported saw of each other; a way is (sender, receiver)."""

    tcp: Mapping[Way, str]
    heard: Mapping[Way, tuple[int, int]]
    loss: Mapping[Way, float]

    @property
    def passes(self) -> list[Way]:
        """The ways on which small datagrams arrive."""
        return [way for way in self.heard if self.heard[way][0]]

    @property
    def worst(self) -> Way:
        return max(self.loss, key=lambda way: self.loss[way])

    @property
    def refused(self) -> Way | None:
        return next((way for way in self.tcp if self.tcp[way] == "refused"), None)


def _fault(nodes: Sequence[str], answers: Mapping[int, Answer], low: int, high: int) -> PairFault | None:
    """Return what is wrong between two nodes which both reported; None where the network carries."""
    ways = [(low, high), (high, low)]
    heard = {way: answers[way[1]].heard.get(way[0], (0, 0)) for way in ways}
    link = _Link(
        tcp={way: answers[way[0]].tcp.get(way[1], "") for way in ways},
        heard=heard,
        loss={way: _loss(heard[way], answers[way[1]].num_dropped) for way in ways},
    )
    has_failed = any(found != "good" for found in link.tcp.values())
    found = _of_failed(link) if has_failed else _of_lossy(link)
    if found is None:
        return None
    (one, other), fault = found
    return PairFault(nodes=(nodes[one], nodes[other]), fault=fault, loss=round(link.loss[one, other], 4))


def _of_failed(link: _Link) -> tuple[Way, Fault]:
    """Return what is wrong where a connection failed. A datagram that arrives proves its way; none may be a firewall's doing."""
    plain = next(iter(link.tcp))
    if not link.passes and not {"small", "large", "good"} & {*link.tcp.values()}:
        return (plain, "nothing passes") if link.refused is None else (link.refused, "refused")
    if len(link.passes) == 1 and "good" not in link.tcp.values():
        ((one, other),) = link.passes
        return (other, one), "one way"
    stuck = [way for way in link.passes if not link.heard[way][1]]
    if stuck:
        return stuck[0], "large packets"
    if link.loss[link.worst] >= MUCH_LOSS:
        return link.worst, "loss"
    if "large" in link.tcp.values():
        return next(way for way in link.tcp if link.tcp[way] == "large"), "large packets"
    return (plain, "TCP") if link.refused is None else (link.refused, "refused")


def _of_lossy(link: _Link) -> tuple[Way, Fault] | None:
    """Return what is wrong where TCP passes. Where no datagram does, a firewall drops them, which does not concern the workers."""
    share = link.loss[link.worst]
    if len(link.passes) < len(link.tcp) or share < LITTLE_LOSS:
        return None
    return link.worst, "loss" if share >= MUCH_LOSS else "little loss"


def _loss(heard: tuple[int, int], num_dropped: int) -> float:
    """Return the share of packets lost one way; of sizes that do not pass at all, nothing is counted."""
    sizes = [num for num in heard if num]
    sent = NUM_DATAGRAMS * len(sizes)
    lost = sent - sum(sizes) - num_dropped  # what the reader's own kernel dropped, the network has carried
    return lost / sent if sent and lost >= _FEWEST_LOST else 0.0


def _bad_nodes(probed: Collection[tuple[int, int]], bad: Collection[tuple[int, int]]) -> set[int]:
    """Return the nodes of which all pairs are bad, where at least two are known and other pairs are good.

    Of a pair alone nobody can say which of its nodes fails; where no pair carries, no node is the odd one.
    """
    if len(bad) == len(probed):
        return set()
    numbers = {number for pair in probed for number in pair}
    own = {number: [pair for pair in probed if number in pair] for number in numbers}
    return {number for number, pairs in own.items() if len(pairs) > 1 and all(pair in bad for pair in pairs)}
