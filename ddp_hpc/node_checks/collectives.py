"""What the nodes say of an all-reduce between them, and what it means: is the result right, which link is slow. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddp_hpc.node_checks.answers import listed
from ddp_hpc.node_checks.of_network import slow_nodes, slow_ways
from ddp_hpc.rendezvous.links.rounds import rounds_of
from ddp_hpc.run_dir.network import Pace
from ddp_hpc.run_dir.preflight import Finding

CHECK = "all-reduce"
LIMIT_S = 90.0
"""How long a node may take for all of it; importing PyTorch from a cold file system takes most of that."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """An all-reduce of this node with one other, or with all."""

    mb_per_s: float
    """Bytes of the tensor divided by the time of the fastest round, in 10^6 bytes a second: for two nodes, what each sends and receives."""
    num_wrong: int = 0
    """Elements of the result that are not the sum."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one node saw."""

    backend: str = ""
    stage: str
    """What it was at when it ended: `done`, or what it waited for."""
    error: str = ""
    whole: Exchange | None = None
    """Of all nodes together."""
    pairs: Mapping[str, Exchange] = field(default_factory=dict)
    """Of this node with each other one that it was paired with, as far as they came to an end."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """The other node of an exchange that came to no end, or "" where that was the one of all nodes -> why."""
    ready_s: float = 0.0
    """After how long it was ready to join: mostly, importing PyTorch."""

    @property
    def as_record(self) -> dict[str, Any]:
        """This report as JSON takes it."""
        return asdict(self)


DONE, IMPORTING, JOINING, ALL = "done", "importing PyTorch", "joining", "the all-reduce of all nodes"
ENDING = "the end of the others"
"""Its own exchanges are over."""


def report_of(plain: Any) -> NodeReport | None:
    """Return a node's report from JSON; None for anything else."""
    try:
        known = {**plain, "pairs": {str(node): Exchange(**one) for node, one in plain["pairs"].items()}}
        return NodeReport(**{**known, "whole": None if plain["whole"] is None else Exchange(**plain["whole"])})
    except (KeyError, TypeError, AttributeError):
        return None


def findings_of(nodes: Sequence[str], reports: Mapping[str, NodeReport], *, problem: str = "") -> Iterator[Finding]:
    """Yield what the reports mean. `problem` is why others did not come, as srun says."""
    if not reports:
        why = f": {problem}" if problem else ""
        yield Finding(check=CHECK, level="unknown", found=f"no node could do an all-reduce{why}")
        return
    wrong = {node: found for node, report in reports.items() if (found := _num_wrong(report))}
    broken = {node: report for node, report in reports.items() if report.error or report.stage != DONE}
    failed = {node: report for node, report in reports.items() if report.failed}
    silent = [node for node in nodes if node not in reports]
    if wrong:
        yield _wrong(wrong, reports)
    if broken or silent:
        yield _unfinished(nodes, reports, broken, silent, problem)
    elif failed:
        yield _failed(nodes, reports)
    elif not wrong:
        yield _speed(nodes, reports)


def _num_wrong(report: NodeReport) -> int:
    exchanges = [*report.pairs.values(), *([report.whole] if report.whole else [])]
    return sum(one.num_wrong for one in exchanges)


def _wrong(wrong: Mapping[str, int], reports: Mapping[str, NodeReport]) -> Finding:
    """Name a node where all its pairs have wrong sums, and no pair without it has."""
    pairs = {frozenset({node, other}) for node in reports for other in reports[node].pairs}
    bad = {
        frozenset({node, other})
        for node, report in reports.items()
        for other, one in report.pairs.items()
        if one.num_wrong
    }
    of_node = {node: {pair for pair in pairs if node in pair} for node in reports}
    odd = [node for node, own in of_node.items() if len(own) > 1 and own == bad]
    named = tuple(odd) if len(odd) == 1 else ()
    shown = (
        "; ".join(" - ".join(sorted(pair)) for pair in sorted(bad, key=sorted))
        or "no pair alone, only all nodes together"
    )
    found = f"the sum is wrong on {listed([*wrong])} ({sum(wrong.values())} elements); pairs with wrong sums: {shown}"
    leave = f"leave out {listed(named)}, and " if named else ""
    to_do = f"a training on these nodes would get wrong gradients: {leave}tell your cluster's support"
    return Finding(check=CHECK, level="fail", found=found, to_do=to_do, nodes=named)


def _measured(reports: Mapping[str, NodeReport]) -> dict[frozenset[str], float]:
    """Return the speed of each pair that came to an end on one side at least, in MB/s."""
    return {
        frozenset({node, other}): one.mb_per_s
        for node, report in reports.items()
        for other, one in report.pairs.items()
    }


def _failed_pairs(reports: Mapping[str, NodeReport]) -> set[frozenset[str]]:
    """Return the pairs that came to no end on one side at least."""
    return {frozenset({node, other}) for node, report in reports.items() for other in report.failed if other}


def _partly(nodes: Sequence[str], reports: Mapping[str, NodeReport]) -> str:
    """Say which pairs were measured, and which were not."""
    failed = _failed_pairs(reports)
    measured = {pair: rate for pair, rate in _measured(reports).items() if pair not in failed}  # one side may end
    pairs = [frozenset({nodes[low], nodes[high]}) for of_round in rounds_of(len(nodes)) for low, high in of_round]
    missing = [pair for pair in pairs if pair not in measured]
    if not measured:
        return "no pair of nodes was measured"
    slowest = min(measured, key=lambda pair: measured[pair])
    rates = f"{min(measured.values()):.4g} to {max(measured.values()):.4g} MB/s"
    said = f"measured: {len(measured)} of {len(pairs)} pairs, {rates}, the slowest is {_named(slowest)}"
    few = "; ".join(map(_named, missing[:_MOST_SHOWN]))
    more = f"; and {len(missing) - _MOST_SHOWN} more" if len(missing) > _MOST_SHOWN else ""
    return f"{said}; not measured: {few or 'none'}{more}"


_MOST_SHOWN = 8


def _named(pair: frozenset[str]) -> str:
    return " - ".join(sorted(pair))


def _failed(nodes: Sequence[str], reports: Mapping[str, NodeReport]) -> Finding:
    """Name a node that is in all pairs that came to no end, where it is one only, and others came to theirs."""
    bad = _failed_pairs(reports)
    own = {node: {pair for pair in {*bad, *_measured(reports)} if node in pair} for node in nodes}
    odd = [node for node in nodes if len(own[node]) > 1 and own[node] == bad]
    named = tuple(odd) if len(odd) == 1 else ()
    why = next(why for report in reports.values() for why in report.failed.values())
    shown = "; ".join(map(_named, sorted(bad, key=sorted)[:_MOST_SHOWN]))
    # All pairs are done before the exchange of all nodes.
    which = (
        f"did not finish: {shown}"
        if bad
        else "the all-reduce of all nodes together did not end, though that of each pair did"
    )
    leave = f"leave out {listed(named)}, or " if named else ""
    return Finding(
        check=CHECK,
        level="fail",
        found=f"{which} ({why}); {_partly(nodes, reports)}",
        to_do=f"a training on these nodes hangs or is very slow: {leave}ask the administrators to examine the network between them",
        nodes=named,
    )


def _unfinished(
    nodes: Sequence[str],
    reports: Mapping[str, NodeReport],
    broken: Mapping[str, NodeReport],
    silent: Sequence[str],
    problem: str,
) -> Finding:
    """Name the nodes that did not come to the exchange, where they are fewer than half: the others only wait for them.

    Without the node that all meet at, the others stay behind, too, when they join.
    """
    said = [f"{node}: {report.error or _late(report.stage)}" for node, report in broken.items()]
    if silent:
        said.append(f"no report from {listed(silent)}{f' ({problem})' if problem else ''}")
    said.append(_partly(nodes, reports))
    absent = [*silent, *(node for node, report in broken.items() if report.stage == IMPORTING)]
    late = absent or [node for node, report in broken.items() if report.stage == JOINING]
    named = tuple(node for node in nodes if node in late) if len(late) * 2 < len(nodes) else ()
    leave = f"leave out {listed(named)}, or " if named else ""
    to_do = f"{leave}ask your cluster's support; with `debug.nccl=info`, a run logs which network it uses"
    return Finding(check=CHECK, level="fail", found="; ".join(said), to_do=to_do, nodes=named)


def _late(stage: str) -> str:
    if stage == ENDING:
        return "did all of its own exchanges, but did not learn in time that the other nodes had done theirs"
    return f"was not done in time with {stage}"


def _speed(nodes: Sequence[str], reports: Mapping[str, NodeReport]) -> Finding:
    paces = [
        Pace(sender=node, receiver=other, mb_per_s=one.mb_per_s, ahead_s=0.0, trip_s=0.0)
        for node, report in reports.items()
        for other, one in report.pairs.items()
    ]
    backend = next(report.backend for report in reports.values())
    whole = min((report.whole.mb_per_s for report in reports.values() if report.whole), default=0.0)
    found = f"the sums are right on all {len(nodes)} nodes by {backend}: {whole:.0f} MB/s with all nodes"
    if not paces:
        return Finding(check=CHECK, level="ok", found=found)
    slow = slow_ways(paces)
    bad = slow_nodes(paces, slow)
    rates = {frozenset({one.sender, one.receiver}): one.mb_per_s for one in paces}
    slowest = min(rates, key=lambda pair: rates[pair])
    found += f", {min(rates.values()):.0f} to {max(rates.values()):.0f} MB/s with two nodes; the slowest pair is {' - '.join(sorted(slowest))}"
    if len(nodes) > 2:
        found += f", the slowest node {_slowest(paces)}"
    to_do = "leave the node out, and examine its link" if bad else "examine the switch between them" if slow else ""
    return Finding(check=CHECK, level="warn" if slow else "ok", found=found, to_do=to_do, nodes=tuple(bad))


def _slowest(paces: Sequence[Pace]) -> str:
    """Return the node whose fastest pair is the slowest: one slow partner does not make a node slow."""
    best: dict[str, float] = {}
    for pace in paces:
        for node in (pace.sender, pace.receiver):
            best[node] = max(best.get(node, 0.0), pace.mb_per_s)
    return min(sorted(best), key=lambda node: best[node])
