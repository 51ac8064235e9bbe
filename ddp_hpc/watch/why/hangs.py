"""What was wrong in a hang, and with the network between the nodes, by the records of ranks and probes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddp_hpc.base.names import shorten_names
from ddp_hpc.watch.why.findings import AttemptFacts, EvidenceLine, Verdict

_HANGS: Mapping[str, str] = {
    "behind": "hang-behind",
    "different": "hang-mismatch",
    "network": "hang-nobody",
    "crashed": "native-crash",
}
"""The supervisor's verdict (`WorkerFailure.hang_kind`) -> class."""


def verdict_on_hang(facts: AttemptFacts) -> Verdict:
    """Return what a hang was, by the verdict in the supervisor's report."""
    failure = next((one for one in facts.failures if one.is_hang), None)
    is_faulty = facts.network is not None and facts.network.is_faulty
    # As older versions say it.
    is_of_nobody = failure is not None and failure.rank < 0 and failure.hang_kind in {"", "network"}
    if is_faulty and (failure is None or failure.hang_kind == "link" or is_of_nobody):
        return verdict_on_network(facts)
    if failure is None:
        return Verdict(failure="hang", role="either")
    # An older version gave no kind to a rank that only the stacks show.
    kind = failure.hang_kind or ("behind" if failure.rank >= 0 and len(facts.logs) > 1 else "")
    return Verdict(
        failure=_HANGS.get(kind, "hang"),
        role="either",
        rank=failure.rank if failure.rank >= 0 else None,
        host=failure.host,
        at=failure.at,
        detail=failure.hang_detail or failure.exception,
    )


def is_network_to_blame(facts: AttemptFacts, findings: Sequence[Verdict]) -> bool:
    """Tell whether a probe proves that nodes do not reach each other, and all that ranks report are lost connections."""
    if facts.network is None or not facts.network.is_faulty:
        return False
    return all(one.role == "cascade" or one.failure in _CONNECTION_FAILURES for one in findings)


_CONNECTION_FAILURES = {"unknown", "collective-timeout", "ranks-missing"}
"""Classes that say no more than that a rank did not hear of another one."""


def verdict_on_network(facts: AttemptFacts) -> Verdict:
    """Return what the probe of the network proves."""
    assert facts.network is not None  # noqa: S101  the callers looked
    words, nodes = facts.network.words, facts.network.culprits_text
    evidence = (EvidenceLine("root", None, f"probe of the network: {words}"),)
    return Verdict(failure="hang-network", host=nodes, detail=words, evidence=evidence)


def verdict_on_missing_ranks(finding: Verdict, facts: AttemptFacts) -> Verdict:
    """Name the ranks that never joined, instead of one that waited for them."""
    if facts.missing is None or not facts.missing.ranks:
        return finding
    nodes = {rank: facts.missing.node_of(rank, facts.attempt.nodes) for rank in facts.missing.ranks}
    named = [f"rank {rank}{f' on {node}' if node else ''}" for rank, node in nodes.items()]
    words = f"{shorten_names(named, 8)} did not join"
    evidence = (EvidenceLine("root", None, f"record of rank zero: {words}"), *finding.evidence)
    first, detail = facts.missing.ranks[0], f"{words}; {finding.detail}"
    return replace(finding, rank=first, host=nodes[first], basis="record", detail=detail, evidence=evidence)
