"""The campaign of broken networks without Slurm: four nodes in namespaces, a real probe, and who is named.

    python -m tests.campaigns.networks        # as root; writes docs/results/network-probe.md

`tests.slurm.broken_networks` breaks the network under trainings on the test cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from ddp_hpc.run.run_dir.network import NetworkFindings
from tests.campaigns.command_line import parser_of
from tests.campaigns.written import RESULTS, stamp
from tests.distributed.node_networks import Nodes, call, made, pull, put_back, why_not

TABLE = RESULTS / "network-probe.md"
Begin = Callable[[Nodes], None]
ALL = ("node1", "node2", "node3", "node4")


def hole(one: str, other: str) -> Begin:
    def begin(nodes: Nodes) -> None:
        nodes.drop_from(one, other)
        nodes.drop_from(other, one)

    return begin


def hole_around(node: str) -> Begin:
    def begin(nodes: Nodes) -> None:
        for other in ALL:
            if other != node:
                hole(node, other)(nodes)

    return begin


def mute(node: str) -> Begin:
    def begin(nodes: Nodes) -> None:
        for other in ALL:
            if other != node:
                nodes.drop_from(other, node)

    return begin


def one_way(sender: str, receiver: str) -> Begin:
    return lambda nodes: nodes.drop_from(receiver, sender)


def split(*pairs: tuple[str, str]) -> Begin:
    def begin(nodes: Nodes) -> None:
        for one, other in pairs:
            hole(one, other)(nodes)

    return begin


def unplugged(node: str) -> Begin:
    return lambda nodes: pull(nodes, node)


def across(left: Sequence[str], right: Sequence[str]) -> list[tuple[str, str]]:
    pairs = [(one, other) for one in left for other in right]
    return sorted((min(pair), max(pair)) for pair in pairs)


SPLITS = [across(ALL[:2], ALL[2:]), across((ALL[0], ALL[2]), (ALL[1], ALL[3])), across((ALL[0], ALL[3]), ALL[1:3])]
CASES: Sequence[tuple[str, str, Begin]] = (
    *(
        ("black hole between two nodes", " - ".join(pair), hole(*pair))
        for pair in (("node1", "node2"), ("node1", "node4"), ("node2", "node3"), ("node3", "node4"))
    ),
    *(("black hole around a node", node, hole_around(node)) for node in ("node1", "node3")),
    *(
        ("one-way loss between two nodes", " - ".join(pair), one_way(*pair))
        for pair in (("node1", "node3"), ("node3", "node1"), ("node2", "node4"), ("node4", "node3"), ("node2", "node1"))
    ),
    *(("nothing that a node sends arrives", node, mute(node)) for node in ("node1", "node4")),
    *(("cable of a node pulled", node, unplugged(node)) for node in ALL),
    *(("fabric cut in two", ", ".join(" - ".join(pair) for pair in pairs), split(*pairs)) for pairs in SPLITS),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Try all cases; write the table."""
    parser_of("tests.campaigns.networks", __doc__).parse_args(argv)
    reason = why_not()
    if reason:
        sys.stderr.write(f"{reason}\n")
        return 1
    lines, found = [], []
    with made(len(ALL)) as nodes:
        for kind, expected, begin in CASES:
            begin(nodes)
            findings = nodes.probe()
            for node, namespace in nodes.namespaces.items():
                call("ip", "netns", "exec", namespace, "iptables", "-F")
                put_back(nodes, node)
            is_right = findings.culprits_text == expected
            found.append((is_right, findings))
            lines.append(
                f"| {kind} | {expected} | {findings.culprits_text} | {'yes' if is_right else 'NO'} | {findings.seconds:.0f} |"
            )
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
        healthy = [nodes.probe() for _ in range(5)]
    TABLE.write_text(as_text(lines, found, healthy), encoding="utf-8")
    return 0 if all(is_right for is_right, _ in found) else 1


def as_text(
    lines: Sequence[str], found: Sequence[tuple[bool, NetworkFindings]], healthy: Sequence[NetworkFindings]
) -> str:
    stamped = stamp()
    right, slowest = sum(is_right for is_right, _ in found), max(findings.seconds for _, findings in found)
    return (
        "# Which nodes do not reach each other: the probe\n\n"
        f"{right} of {len(found)} right, the slowest after {slowest:.0f} s; of {len(healthy)} probes of the whole network, "
        f"{sum(one.carries_everywhere for one in healthy)} found nothing amiss, after {max(one.seconds for one in healthy):.0f} s at most. Four nodes as network "
        "namespaces of one machine of two cores, while other work ran; the order goes over a pipe, where a job has srun. "
        f"Commit {stamped['commit'][:12]}, {stamped['date']}, by `python -m tests.campaigns.networks`.\n\n"
        "| what was broken | where | named | right | seconds |\n| --- | --- | --- | --- | --- |\n"
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
