"""What was wrong in a hang, and with the network between the nodes, by the records of ranks and probes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.watch.why.findings import ANY_NUMBER, AttemptFacts, EvidenceLine, RankFinding

_HANGS: Mapping[str, str] = {
    "behind": "hang-behind",
    "different": "hang-mismatch",
    "network": "hang-nobody",
    "crashed": "native-crash",
}
"""What the ranks' collectives, or their states, show (`WorkerFailure.hang_kind`) -> class."""


def of_hang(facts: AttemptFacts) -> RankFinding:
    """Return what a hang was: by the probe of the network, the ranks' collectives, or their stacks."""
    failure = next((one for one in facts.failures if one.is_hang), None)
    is_found = failure is not None and (
        failure.rank in facts.places or failure.hang_kind in {"behind", "different", "crashed"}
    )
    if facts.network is not None and facts.network.is_faulty and not is_found:
        # A rank without a stack is the one that the others wait for, unless its own node's links explain it.
        is_elsewhere = failure is not None and failure.host and not facts.network.is_at_fault(failure.host)
        if failure is None or failure.rank < 0 or not is_elsewhere:
            return of_network(facts)
    if failure is None:
        return RankFinding(failure="hang", role="either", basis="record", rank=None)
    finding = RankFinding(failure="hang", role="either", basis="record", rank=None, at=failure.at)
    if failure.hang_kind not in _HANGS:
        return _by_stacks(finding, failure, facts)
    rank = failure.rank if failure.rank >= 0 else None
    name = _HANGS[failure.hang_kind]
    return replace(finding, failure=name, rank=rank, host=failure.host, detail=failure.hang_detail)


def _by_stacks(finding: RankFinding, failure: WorkerFailure, facts: AttemptFacts) -> RankFinding:
    """Return what a hang was, as far as the places show it at which the ranks were."""
    if failure.rank >= 0 and facts.places:
        place = facts.places.get(failure.rank, "")
        name = "hang-behind" if len(facts.places) > 1 or len(facts.logs) > 1 else "hang"
        return replace(
            finding, failure=name, rank=failure.rank, host=failure.host, detail=place and f"it was in {place}"
        )
    if failure.rank >= 0 and len(facts.logs) > 1:
        return replace(finding, failure="hang-behind", rank=failure.rank, host=failure.host)
    if len(facts.places) < 2:
        return finding
    calls = {ANY_NUMBER.sub("", place) for place in facts.places.values()}
    detail = "; ".join(f"rank {rank}: {place}" for rank, place in sorted(facts.places.items())[:4])
    return replace(finding, failure="hang-nobody" if len(calls) == 1 else "hang-mismatch", detail=detail)


def is_network_to_blame(facts: AttemptFacts, findings: Sequence[RankFinding]) -> bool:
    """Tell whether a probe proves that nodes do not reach each other, and all that ranks report are lost connections."""
    if facts.network is None or not facts.network.is_faulty:
        return False
    return all(one.role == "cascade" or one.failure in _OF_CONNECTIONS for one in findings)


_OF_CONNECTIONS = {"unknown", "collective-timeout", "ranks-missing"}
"""Classes that say no more than that a rank did not hear of another one."""


def of_network(facts: AttemptFacts) -> RankFinding:
    """Return what the probe of the network proves."""
    assert facts.network is not None  # noqa: S101  the callers looked
    words, nodes = facts.network.words, facts.network.culprits
    evidence = (EvidenceLine(role="root", rank=None, text=f"probe of the network: {words}"),)
    return RankFinding(
        failure="hang-network", role="root", basis="record", rank=None, host=nodes, detail=words, evidence=evidence
    )


def of_missing(finding: RankFinding, facts: AttemptFacts) -> RankFinding:
    """Name the ranks that never joined, instead of one that waited for them."""
    if facts.missing is None or not facts.missing.ranks:
        return finding
    nodes = {rank: facts.missing.node_of(rank, facts.attempt.nodes) for rank in facts.missing.ranks}
    named = ", ".join(f"rank {rank}{f' on {node}' if node else ''}" for rank, node in list(nodes.items())[:8])
    more = f", and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    words = f"{named}{more} did not join"
    evidence = (EvidenceLine(role="root", rank=None, text=f"record of rank zero: {words}"), *finding.evidence)
    first = facts.missing.ranks[0]
    return replace(
        finding, rank=first, host=nodes[first], basis="record", detail=f"{words}; {finding.detail}", evidence=evidence
    )
