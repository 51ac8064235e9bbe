"""From the answers of all nodes to findings: a table of checks, each of which says which node differs, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ddp_hpc.cluster.node_checks import of_files, of_network, of_node
from ddp_hpc.cluster.node_checks.answers import NodeAnswers
from ddp_hpc.run.run_dir.preflight import Finding


def findings_of(answers: NodeAnswers) -> tuple[Finding, ...]:
    """Return what all checks found, in the order of the table."""
    if not answers.facts:
        return tuple(of_node.check_answered(answers))
    return tuple(finding for check in CHECKS for finding in check(answers))


CHECKS: Sequence[Callable[[NodeAnswers], Iterator[Finding]]] = (
    of_node.check_answered,
    of_network.check_interfaces,
    of_network.check_network,
    of_node.check_names,
    of_files.check_shared_dir,
    of_files.check_paths,
    of_files.check_disks,
    of_node.check_software,
    of_node.check_drivers,
    of_node.check_gpus,
    of_node.check_cpus,
    of_node.check_limits,
)
"""In the order in which a person should read them."""
