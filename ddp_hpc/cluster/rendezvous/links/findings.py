"""From what the nodes saw of each other to the node, or the pair of nodes, that the network does not carry. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_network

from ddp_hpc.cluster.rendezvous.links.probe import NUM_DATAGRAMS
from ddp_hpc.cluster.rendezvous.links.rounds import rounds_of
from ddp_hpc.run.run_dir.network import Fault, LinkMetrics, NetworkFindings, PairFault

DirectedPair = tuple[int, int]
"""From one node to another, by their numbers."""

MUCH_LOSS = 0.05
"""Of so many packets lost, TCP makes hardly any progress."""
LITTLE_LOSS = 0.005
_FEWEST_LOST = 2


@dataclass(kw_only=True)
class NodeLinkReport:
    """What one node has reported so far."""

    address: str = ""
    """On the workers' network; empty where it has none there."""
    network: str = ""
    """The subnet of that address."""
    tcp: dict[int, str] = field(default_factory=dict)
    """What became of its connections, by partner."""
    heard: dict[int, tuple[int, int]] = field(default_factory=dict)
    """How many small and large datagrams arrived, by sender."""
    missed: dict[int, int] = field(default_factory=dict)
    """How many datagrams of a sender are not counted, as they were sent before the first that arrived."""
    num_dropped: int = 0
    """How many its own kernel dropped, because its process was too slow to read them."""
    is_whole: bool = False
    """Whether it reported to the end."""
    paces: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    """What it measured, by partner: MB/s, by how many seconds the partner's clock is ahead, seconds of the round trip."""


def findings_of(
    nodes: Sequence[str], answers: Mapping[int, NodeLinkReport], *, address: str, at: float, seconds: float
) -> NetworkFindings:
    """Return what the answers prove. `nodes` are the job's, in the order of their numbers."""
    off = off_network(answers, address)
    whole = {number for number, answer in answers.items() if answer.is_whole}
    silent = {*range(len(nodes))} - off - whole
    left_out = off | silent
    pairs = {pair for pairs_of_round in rounds_of(len(nodes)) for pair in pairs_of_round if left_out.isdisjoint(pair)}
    links = {pair: _link_of(answers, *pair) for pair in pairs}
    faults = {pair: found for pair, link in links.items() if (found := _fault_of(nodes, link)) is not None}
    bad = {pair: found for pair, found in faults.items() if found.fault not in _HARMLESS}
    unknown = {pair: found for pair, found in faults.items() if found.fault == "no answer"}
    lossy = {pair: found for pair, found in faults.items() if found.fault == "little loss"}
    known = pairs - unknown.keys()
    bad_nodes = off if len(off) < len(nodes) else set[int]()
    if len(bad) < len(known):  # where no pair carries, no node is the odd one
        bad_nodes = bad_nodes | _bad_nodes(known, {pair for pair in bad if not links[pair].has_carried})
    return NetworkFindings(
        at=at,
        seconds=round(seconds, 1),
        address=address,
        num_nodes=len(nodes),
        num_pairs=len(known),
        bad_nodes=tuple(nodes[number] for number in sorted(bad_nodes)),
        off_network=tuple(nodes[number] for number in sorted(off)),
        pairs=_sorted_faults(bad),
        lossy=_sorted_faults(lossy),
        unknown=_sorted_faults(unknown),
        silent=tuple(nodes[number] for number in sorted(silent)),
        paces=tuple(
            LinkMetrics(sender=nodes[at_], receiver=nodes[to], mb_per_s=rate, ahead_s=ahead, trip_s=trip)
            for at_, answer in sorted(answers.items())
            for to, (rate, ahead, trip) in sorted(answer.paces.items())
        ),
    )


_HARMLESS = frozenset({"little loss", "no answer"})


def confirm_findings(first: NetworkFindings, again: NetworkFindings | None) -> NetworkFindings:
    """Return what two probes prove: only a node that both find bad is. Without a second one, none is, but its pairs stand."""
    is_sampled_twice = again is not None and not again.problem
    newest = again if again is not None and is_sampled_twice else first
    both = {*first.bad_nodes} & {*newest.bad_nodes} if is_sampled_twice else set[str]()
    return replace(
        newest,
        at=first.at,
        seconds=round(first.seconds + (0.0 if again is None else again.seconds), 1),
        bad_nodes=tuple(node for node in newest.bad_nodes if node in both),
        off_network=tuple(node for node in newest.off_network if node in both),
        silent=(*newest.silent, *(node for node in newest.off_network if node not in both)),
    )


def off_network(answers: Mapping[int, NodeLinkReport], address: str) -> set[int]:
    """Return the nodes that have no address of their own on the workers' network.

    These are the nodes that said so, the nodes that listen at rank zero's address, and rank zero's node where its subnet is not that
    of `address`, which was its own when the ranks met. Of other nodes, a subnet proves nothing: routers may connect the
    subnets of several racks, each with many nodes.
    """
    off = {number for number, answer in answers.items() if answer.is_whole and not answer.address}
    zero = answers.get(0, NodeLinkReport())
    if not zero.address or ip_address(zero.address.partition("%")[0]).is_loopback:  # then all are on this machine
        return off
    # A node of a cloned image, or one that may bind addresses that it does not have (ip_nonlocal_bind), listens at rank zero's.
    off |= {number for number, answer in answers.items() if number and answer.address == zero.address}
    is_elsewhere = bool(zero.network) and not _is_in_network(zero.network, address)
    if is_elsewhere and any(_is_in_network(answer.network, address) for answer in answers.values()):
        off.add(0)
    return off


def _is_in_network(network: str, address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]) in ip_network(network)
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class _Link:
    """What two nodes that both reported saw of each other; a way is (sender, receiver)."""

    tcp: Mapping[DirectedPair, str]
    heard: Mapping[DirectedPair, tuple[int, int]]
    loss: Mapping[DirectedPair, float]
    is_counted: Mapping[DirectedPair, bool]
    """Whether the receiver's process read all datagrams that its kernel received."""

    @property
    def has_carried(self) -> bool:
        """Whether a connection passed all of its bytes, both ways."""
        return self.first_way_with("good") is not None

    @property
    def passing_ways(self) -> list[DirectedPair]:
        """The ways on which small datagrams arrive."""
        return [way for way in self.heard if self.heard[way][0]]

    @property
    def lossiest_way(self) -> DirectedPair:
        return max(self.loss, key=lambda way: self.loss[way])

    def first_way_with(self, *found: str) -> DirectedPair | None:
        """Return the first way whose connection came to one of these."""
        return next((way for way in self.tcp if self.tcp[way] in found), None)


def _link_of(answers: Mapping[int, NodeLinkReport], low: int, high: int) -> _Link:
    ways = [(low, high), (high, low)]
    heard = {way: answers[way[1]].heard.get(way[0], (0, 0)) for way in ways}
    return _Link(
        tcp={way: answers[way[0]].tcp.get(way[1], "") for way in ways},
        heard=heard,
        loss={way: _loss(heard[way], answers[way[1]], way[0]) for way in ways},
        is_counted={way: not answers[way[1]].num_dropped for way in ways},
    )


def _fault_of(nodes: Sequence[str], link: _Link) -> PairFault | None:
    found = _fault_of_working(link) if link.has_carried else _fault_of_failed(link)
    if found is None:
        return None
    (one, other), fault = found
    return PairFault(nodes=(nodes[one], nodes[other]), fault=fault, loss=round(link.loss[one, other], 4))


def _fault_of_working(link: _Link) -> tuple[DirectedPair, Fault] | None:
    """Return what is wrong where a connection passed all of its bytes, both ways: the network carries what workers send.

    Lost datagrams are no more than worth a remark. Where none arrive, a firewall drops them, which does not concern the workers.
    """
    refused = link.first_way_with("refused")
    if refused is not None:
        return refused, "refused"
    if link.first_way_with("connect") is not None:
        return next(iter(link.tcp)), "TCP"
    if len(link.passing_ways) < len(link.tcp) or link.loss[link.lossiest_way] < LITTLE_LOSS:
        return None
    return link.lossiest_way, "little loss"


def _fault_of_failed(link: _Link) -> tuple[DirectedPair, Fault]:
    """Return what is wrong where no connection passed all of its bytes."""
    if not {"connect", "refused"}.issuperset(link.tcp.values()):
        return _fault_after_connect(link)
    plain, refused = next(iter(link.tcp)), link.first_way_with("refused")
    if len(link.passing_ways) == 1 and link.first_way_with("connect") is not None:
        ((one, other),) = link.passing_ways
        return (other, one), "one way"
    if link.passing_ways and link.loss[link.lossiest_way] >= MUCH_LOSS:
        return link.lossiest_way, "loss"
    if refused is not None:
        return refused, "refused"
    return plain, "TCP" if link.passing_ways else "nothing passes"


def _fault_after_connect(link: _Link) -> tuple[DirectedPair, Fault]:
    """Return what is wrong where a connection was made, but passed too little, or was not tried.

    It proves that small packets pass both ways. What came of it depends on the processes, too, which may not run for seconds:
    only packets that are lost prove that the network loses them.
    """
    stuck = [way for way in link.passing_ways if not link.heard[way][1] and link.is_counted[way]]
    if stuck:
        return stuck[0], "large packets"
    if link.loss[link.lossiest_way] >= MUCH_LOSS:
        return link.lossiest_way, "loss"
    halted = link.first_way_with("large")
    if halted is not None and all(link.is_counted.values()) and not any(large for _, large in link.heard.values()):
        return halted, "large packets"
    return next(iter(link.tcp)), "no answer"


def _loss(heard: tuple[int, int], receiver: NodeLinkReport, sender: int) -> float:
    """Return the share of packets lost one way, since the first that arrived; of sizes that do not pass at all, nothing is counted."""
    sizes = [num for num in heard if num]
    sent = NUM_DATAGRAMS * len(sizes) - receiver.missed.get(sender, 0)
    lost = sent - sum(sizes) - receiver.num_dropped  # what the reader's own kernel dropped, the network has carried
    return lost / sent if sent > 0 and lost >= _FEWEST_LOST else 0.0


def _sorted_faults(found: Mapping[tuple[int, int], PairFault]) -> tuple[PairFault, ...]:
    return tuple(found[pair] for pair in sorted(found))


def _bad_nodes(probed: Collection[tuple[int, int]], bad: Collection[tuple[int, int]]) -> set[int]:
    """Return the nodes of which all pairs are bad, where at least two are known.

    Of a pair alone nobody can say which of its nodes fails.
    """
    num_probed = Counter(number for pair in probed for number in pair)
    num_bad = Counter(number for pair in bad for number in pair)
    return {number for number, num in num_probed.items() if num > 1 and num_bad[number] == num}
