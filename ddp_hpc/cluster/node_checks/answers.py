"""The answers of all nodes, and how they are compared: which node is the odd one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ddp_hpc.cluster.node_checks.facts import NodeFacts
from ddp_hpc.run.run_dir.network import NetworkFindings
from ddp_hpc.run.run_dir.preflight import Finding, Level

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class NodeNeeds:
    """What a run needs of each node; None and 0 where that is not known."""

    cpus_per_node: int = 0
    gpus_per_node: int = 0
    open_files: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeAnswers:
    """All that is known of the nodes."""

    nodes: Sequence[str]
    """Of the job, rank zero's first."""
    facts: Mapping[str, NodeFacts]
    """Of those that answered."""
    unstarted: Sequence[str] = ()
    """Those of the others on which Slurm could not start the check."""
    problem: str = ""
    """Why they did not, as srun says."""
    network: NetworkFindings | None = None
    asked: NodeNeeds = field(default_factory=NodeNeeds)

    def by_node(self, part: Callable[[NodeFacts], T | None]) -> dict[str, T]:
        """Return one part of the answers, of the nodes that gave it."""
        told = {node: part(facts) for node, facts in self.facts.items()}
        return {node: value for node, value in told.items() if value is not None}


def odd_nodes(values: Mapping[str, T]) -> tuple[T | None, list[str]]:
    """Return the value that more than half of the nodes have, and the nodes that have another; None where there is none."""
    if not values:
        return None, []
    value, count = Counter(values.values()).most_common(1)[0]
    if count * 2 <= len(values):
        return None, []
    return value, [node for node in values if values[node] != value]


def agreement_finding(check: str, values: Mapping[str, str], *, level: Level, to_do: str) -> Finding:
    """Return whether all nodes that answered have the same."""
    if not values:
        return unknown_finding(check, "no node answered this in time")
    if len({*values.values()}) == 1:
        return Finding(check=check, level="ok", found=f"the same on all nodes: {next(iter(values.values())) or 'none'}")
    common, odd = odd_nodes(values)
    told = odd or list(values)
    found = ", ".join(f"{node} has {values[node] or 'none'}" for node in told)
    others = f"; the other nodes have {common or 'none'}" if odd else ""
    return Finding(check=check, level=level, found=found + others, to_do=to_do, nodes=tuple(odd))


def unknown_finding(check: str, found: str, to_do: str = "") -> Finding:
    """Return that nothing is known."""
    return Finding(check=check, level="unknown", found=found, to_do=to_do)


def judge_nodes(  # noqa: PLR0913  the fields of a finding
    check: str,
    bad: Sequence[str],
    answers: NodeAnswers,
    bad_words: str,
    good_words: str,
    *,
    level: Level = "fail",
    to_do: str = "",
) -> Finding:
    """Return a failure that names nodes, or that all is well."""
    if not bad:
        return Finding(check=check, level="ok", found=good_words)
    # Of what all nodes have in common, no single one is the odd one.
    nodes = () if len(bad) == len(answers.facts) else tuple(bad)
    return Finding(check=check, level=level, found=bad_words, to_do=to_do, nodes=nodes)
