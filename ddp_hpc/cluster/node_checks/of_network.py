"""What the network between the nodes shows: which interfaces are up, which nodes it carries, clocks, and slow links. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from ddp_hpc.cluster.node_checks.answers import NodeAnswers, odd_nodes, unknown_finding
from ddp_hpc.cluster.rendezvous.choose_network import speed_order
from ddp_hpc.run.run_dir.network import LinkMetrics, NetworkFindings
from ddp_hpc.run.run_dir.preflight import Finding, Level

CLOCK_S = 1.0
"""Clocks that differ by more make log lines and the times of files misleading; NTP keeps them within some ms."""
CLOCK_FAIL_S = 30.0
"""Tickets and tokens (Kerberos, munge) are refused beyond some minutes; such a node has no working time service."""
SLOW_SHARE = 1 / 8
"""A link is slow that has less than this share of the speed of the middle one."""


def check_network(answers: NodeAnswers) -> Iterator[Finding]:
    """Say which nodes the network does not carry; then compare clocks and speeds, as far as they were measured."""
    network = answers.network
    if network is None:
        if len(answers.nodes) > 1:
            yield unknown_finding("network", "the network between the nodes was not probed")
        return
    nodes = network.bad_nodes
    to_do = "leave the node out, and tell your cluster's support" if nodes else "tell your cluster's support"
    if network.is_faulty:
        yield Finding(check="network", level="fail", found=network.words, to_do=to_do, nodes=nodes)
    elif network.carries_everywhere:
        level: Level = "warn" if network.lossy else "ok"
        yield Finding(check="network", level=level, found=network.words)
    else:
        yield unknown_finding("network", network.words)
    yield from _check_clocks(network)
    yield from _check_speed(network)


def check_interfaces(answers: NodeAnswers) -> Iterator[Finding]:
    """Find nodes without a kind of network that most have: the ranks would meet on a slower one, which all nodes share."""
    told = answers.by_node(lambda facts: facts.networks)
    kinds = sorted({kind for networks in told.values() for kind in networks}, key=speed_order)
    if not told:
        yield unknown_finding("interfaces", "no node answered in time which networks it has")
        return
    is_good = True
    for kind in kinds:
        counts = {node: networks.get(kind, 0) for node, networks in told.items()}
        common, odd = odd_nodes(counts)
        few = [node for node in odd if counts[node] < (common or 0)]
        if not few:
            continue
        is_good = False
        is_fastest_gone = kind == kinds[0] and not all(counts.values())
        has = ", ".join(f"{node} has {counts[node] or 'no'} interface of {kind} that is up" for node in few)
        yield Finding(
            check="interfaces",
            level="fail" if is_fastest_gone else "warn",
            found=f"{has}; the other nodes have {common}",
            to_do="leave the node out, and tell your cluster's support; else the ranks meet on a slower network",
            nodes=tuple(few),
        )
    common_kinds = [kind for kind in kinds if any(networks.get(kind) for networks in told.values())]
    if is_good:
        yield Finding(check="interfaces", level="ok", found=f"all nodes have: {', '.join(common_kinds) or 'none'}")


def _check_clocks(network: NetworkFindings) -> Iterator[Finding]:
    if not network.paces:
        yield unknown_finding("clocks", "the clocks were not compared, as no two nodes could connect")
        return
    ahead = ahead_s_by_node(network)
    off = {node: seconds for node, seconds in ahead.items() if abs(seconds) > CLOCK_S}
    if not off:
        found = f"each clock is at most {max(map(abs, ahead.values())) * 1000:.0f} ms off the median of all"
        yield Finding(check="clocks", level="ok", found=found)
        return
    found = ", ".join(
        f"{node}'s clock is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} the others"
        for node, seconds in off.items()
    )
    is_bad = any(abs(seconds) > CLOCK_FAIL_S for seconds in off.values())
    nodes = tuple(off)
    if len(off) * 2 >= len(ahead):  # nobody can say which clock is wrong, and no training needs the right time
        found = f"clocks differ by up to {max(ahead.values()) - min(ahead.values()):.1f} s, and no majority of the nodes has the same time"
        is_bad, nodes = False, ()
    to_do = "check the time service on the node (`chronyc tracking`), and tell your cluster's support"
    yield Finding(check="clocks", level="fail" if is_bad else "warn", found=found, to_do=to_do, nodes=nodes)


def ahead_s_by_node(network: NetworkFindings) -> dict[str, float]:
    """Return by how many seconds each node's clock is ahead of the middle one."""
    ahead: dict[str, dict[str, float]] = defaultdict(dict)
    for pace in network.paces:
        ahead[pace.receiver][pace.sender] = -pace.ahead_s
        ahead[pace.sender][pace.receiver] = pace.ahead_s
    reached = [min(ahead)]
    known = {reached[0]: 0.0}
    for node in reached:  # along the links, as not each pair may have measured; the list grows meanwhile
        new = {other: known[node] + seconds for other, seconds in ahead[node].items() if other not in known}
        known |= new
        reached += new
    middle = sorted(known.values())[(len(known) - 1) // 2]
    return {node: seconds - middle for node, seconds in known.items()}


def _check_speed(network: NetworkFindings) -> Iterator[Finding]:
    if not network.paces:
        yield unknown_finding("speed", "no link was measured, as no two nodes could connect")
        return
    by_way = {(pace.sender, pace.receiver): pace.mb_per_s for pace in network.paces}
    rates = sorted(by_way.values())
    middle = rates[len(rates) // 2]
    slow = {way: rate for way, rate in by_way.items() if rate < middle * SLOW_SHARE}
    if not slow:
        found = f"{rates[0]:.0f} to {rates[-1]:.0f} MB/s between two nodes, over one connection"
        yield Finding(check="speed", level="ok", found=found)
        return
    nodes = slow_nodes(network.paces, slow)
    ways = ", ".join(f"{sender} to {receiver} {rate:.1f}" for (sender, receiver), rate in sorted(slow.items())[:6])
    whose = f"{', '.join(nodes)}: " if nodes else ""
    found = f"{whose}slow links, in MB/s: {ways}; the median link has {middle:.0f}"
    examine = (
        "leave the node out, and examine its link (`ethtool`, `ibstat`)" if nodes else "examine the switch between them"
    )
    to_do = f"check once more, as a busy node slows its links for a moment; if they stay slow, {examine}"
    yield Finding(check="speed", level="warn", found=found, to_do=to_do, nodes=tuple(nodes))


def slow_nodes(paces: Sequence[LinkMetrics], slow: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the nodes of which all links are slow in one direction, where others are not: two slow links at least."""
    bad = set[str]()
    for one_end in (attrgetter("sender"), attrgetter("receiver")):
        num_ways = Counter(map(one_end, paces))
        num_slow = Counter(one_end(pace) for pace in paces if (pace.sender, pace.receiver) in slow)
        bad |= {node for node, num in num_slow.items() if num == num_ways[node] > 1}
    return sorted(bad)
