"""From the answers of all nodes to findings: a table of checks, each of which says which node differs, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ddp_hpc.cluster.node_checks import of_files, of_network, of_node
from ddp_hpc.cluster.node_checks.answers import NodeAnswers
from ddp_hpc.run.run_dir.preflight import Finding


def findings_of(answers: NodeAnswers) -> tuple[Finding, ...]:
    """Return what all checks found, in the order of the table."""
    if not answers.facts:
        return tuple(of_node.answered(answers))
    return tuple(finding for check in CHECKS for finding in check(answers))


CHECKS: Sequence[Callable[[NodeAnswers], Iterator[Finding]]] = (
    of_node.answered,
    of_network.interfaces,
    of_network.network,
    of_node.names,
    of_files.shared,
    of_files.paths,
    of_files.disks,
    of_node.software,
    of_node.drivers,
    of_node.gpus,
    of_node.cpus,
    of_node.limits,
)
"""In the order in which a person should read them."""
