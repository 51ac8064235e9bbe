"""Which pairs of nodes are probed, and which node or pair is named for what they saw."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.rendezvous.links.findings import NodeLinkReport, confirm_findings, findings_of
from ddp_hpc.cluster.rendezvous.links.probe import NUM_DATAGRAMS
from ddp_hpc.cluster.rendezvous.links.rounds import ALL_PAIRS_UP_TO, partners, rounds_of
from ddp_hpc.job.ending.network_probe import probe_network
from ddp_hpc.run.run_dir.network import Fault, NetworkFindings, PairFault, read_network, write_network
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.node_networks import step_argv

ALL = (NUM_DATAGRAMS, NUM_DATAGRAMS)
ADDRESS = "10.2.0.1"


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 7, 8, 12, 15, 16])
def test_all_pairs_of_a_small_job_are_probed_once(num_nodes: int) -> None:
    probed = Counter(pair for pairs in rounds_of(num_nodes) for pair in pairs)

    assert probed == {(low, high): 1 for high in range(num_nodes) for low in range(high)}


@pytest.mark.parametrize("num_nodes", [*range(1, 19), 100, 511, 512])
def test_no_node_has_two_partners_in_a_round_and_rounds_are_few(num_nodes: int) -> None:
    rounds = rounds_of(num_nodes)

    assert all(max(Counter(node for pair in pairs for node in pair).values()) == 1 for pairs in rounds)
    assert len(rounds) <= (20 if num_nodes <= ALL_PAIRS_UP_TO else 27)


@pytest.mark.parametrize("num_nodes", [17, 64, 99, 512])
def test_in_a_large_job_each_node_is_probed_by_both_neighbours_and_by_few_others(num_nodes: int) -> None:
    probed = [pair for pairs in rounds_of(num_nodes) for pair in pairs]

    assert len(set(probed)) == len(probed)
    assert {(node, (node + 1) % num_nodes) for node in range(num_nodes - 1)} <= {*probed}
    assert all(4 <= len([one for one in partners(num_nodes, node) if one is not None]) <= 18 for node in (0, 1, 16))


def partners_of(num_nodes: int) -> dict[int, set[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for low, high in (pair for pairs in rounds_of(num_nodes) for pair in pairs):
        found[low].add(high)
        found[high].add(low)
    return found


def test_the_verdict_on_a_large_job_names_its_bad_node_and_takes_steps_as_there_are_pairs() -> None:
    others = partners_of(1000)
    found = {
        node: NodeLinkReport(
            address=f"10.3.{node >> 8}.{node & 255}",
            tcp={one: "connect" if 7 in (node, one) else "good" for one in others[node]},
            heard={one: ALL for one in others[node] if 7 not in (node, one)},
            is_whole=True,
        )
        for node in others
    }

    num_lines = 0

    def count(_frame: object, event: str, _argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        findings = findings_of([f"n{node}" for node in others], found, address=ADDRESS, at=0.0, seconds=1.0)
    finally:
        sys.settrace(before)

    assert findings.bad_nodes == ("n7",)
    assert num_lines < 150 * findings.num_pairs, "each pair is judged once, and no node reads all pairs"


def healthy(num_nodes: int) -> dict[int, NodeLinkReport]:
    others = {node: [one for one in range(num_nodes) if one != node] for node in range(num_nodes)}
    return {
        node: NodeLinkReport(
            address=f"10.2.0.{node + 1}",
            network="10.2.0.0/24",
            tcp=dict.fromkeys(others[node], "good"),
            heard=dict.fromkeys(others[node], ALL),
            is_whole=True,
        )
        for node in range(num_nodes)
    }


def with_link(
    answers: dict[int, NodeLinkReport], sender: int, receiver: int, tcp: str, heard: tuple[int, int] = (0, 0)
) -> dict[int, NodeLinkReport]:
    """Change what the sender's connection came to, and what the receiver heard of it."""
    one, other = answers[sender], answers[receiver]
    return {
        **answers,
        sender: replace(one, tcp={**one.tcp, receiver: tcp}),
        receiver: replace(other, heard={**other.heard, sender: heard}),
    }


def cut(answers: dict[int, NodeLinkReport], one: int, other: int) -> dict[int, NodeLinkReport]:
    return with_link(with_link(answers, one, other, "connect"), other, one, "connect")


def found(answers: dict[int, NodeLinkReport], num_nodes: int = 4) -> NetworkFindings:
    names = [f"node{number + 1}" for number in range(num_nodes)]
    return findings_of(names, answers, address=ADDRESS, at=0.0, seconds=1.0)


def test_a_network_that_carries_is_said_to_carry() -> None:
    findings = found(healthy(4))

    assert (findings.carries_everywhere, findings.is_faulty, findings.num_pairs) == (True, False, 6)
    assert findings.words == "all 4 nodes that were probed reach each other on the network of 10.2.0.1"


def test_a_node_that_reaches_no_other_is_named_without_its_partners() -> None:
    answers = healthy(4)
    for other in (0, 1, 3):
        answers = cut(answers, 2, other)

    findings = found(answers)

    assert (findings.bad_nodes, findings.unexplained_pairs, findings.culprits_text) == (("node3",), [], "node3")
    assert findings.words == "node3 does not reach the other nodes on the network of 10.2.0.1: no packet passes"


def test_of_one_bad_pair_neither_node_is_blamed() -> None:
    findings = found(cut(healthy(4), 0, 2))

    assert (findings.bad_nodes, findings.culprits_text) == ((), "node1 - node3")
    assert findings.words == "on the network of 10.2.0.1, no packet passes between node1 and node3"


def test_of_two_nodes_neither_is_blamed() -> None:
    findings = found(cut(healthy(2), 0, 1), 2)

    assert (findings.bad_nodes, findings.culprits_text) == ((), "node1 - node2")


def test_a_network_split_into_two_groups_blames_no_node() -> None:
    answers = healthy(4)
    for one in (0, 1):
        for other in (2, 3):
            answers = cut(answers, one, other)

    findings = found(answers)

    assert findings.bad_nodes == ()
    assert findings.culprits_text == "node1 - node3, node1 - node4, node2 - node3, node2 - node4"


def test_where_no_pair_carries_no_node_is_blamed() -> None:
    answers = healthy(3)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        answers = cut(answers, one, other)

    findings = found(answers, 3)

    assert (findings.bad_nodes, findings.is_faulty) == ((), True)
    assert findings.words.startswith("no two of the 3 nodes reach each other")


def test_two_bad_nodes_and_a_bad_pair_beside_them_are_all_named() -> None:
    answers = healthy(6)
    for bad in (1, 4):
        for other in {0, 1, 2, 3, 4, 5} - {bad}:
            answers = cut(answers, bad, other)

    findings = found(cut(answers, 0, 3), 6)

    assert (findings.bad_nodes, findings.culprits_text) == (("node2", "node5"), "node2, node5, node1 - node4")


Seen = tuple[str, tuple[int, int]]
"""What became of a connection, and how many small and large datagrams arrived the same way."""
WHOLE: Seen = ("good", ALL)
ODD_LINKS: list[tuple[Seen, Seen, tuple[Fault, str, str] | None]] = [
    (("connect", (0, 0)), ("connect", ALL), ("one way", "node1", "node2")),
    (("connect", ALL), ("connect", (0, 0)), ("one way", "node2", "node1")),
    (("large", (200, 0)), ("large", ALL), ("large packets", "node1", "node2")),
    (("large", (0, 0)), ("large", (0, 0)), ("large packets", "node1", "node2")),  # and a firewall drops datagrams
    (("large", (139, 141)), ("connect", ALL), ("loss", "node1", "node2")),
    (("good", (142, 138)), WHOLE, ("little loss", "node1", "node2")),  # TCP carries: a remark, however much is lost
    (("good", (0, 0)), ("small", (0, 0)), None),  # a process stood still, after the other way had carried
    (("large", ALL), ("good", ALL), None),
    (("small", ALL), ("good", (0, 0)), None),
    (("small", ALL), ("small", ALL), ("no answer", "node1", "node2")),
    (("large", ALL), ("small", ALL), ("no answer", "node1", "node2")),
    (("stranger", ALL), ("large", ALL), ("no answer", "node1", "node2")),
    (("", (0, 0)), ("", (0, 0)), ("no answer", "node1", "node2")),
    (("small", (0, 0)), ("connect", ALL), ("no answer", "node1", "node2")),
    (("small", (120, 130)), ("connect", ALL), ("loss", "node1", "node2")),
    (WHOLE, ("good", (197, 199)), ("little loss", "node2", "node1")),
    (("connect", ALL), ("connect", ALL), ("TCP", "node1", "node2")),
    (("refused", ALL), WHOLE, ("refused", "node1", "node2")),
    (("good", (0, 0)), ("connect", (0, 0)), ("TCP", "node1", "node2")),
    (("good", (0, 0)), ("good", (0, 0)), None),  # a firewall drops datagrams, which the workers do not use
    (("good", (200, 199)), WHOLE, None),
]


@pytest.mark.parametrize(("there", "back", "expected"), ODD_LINKS)
def test_what_is_wrong_with_a_link_follows_from_its_connections_and_datagrams(
    there: Seen, back: Seen, expected: tuple[Fault, str, str] | None
) -> None:
    findings = found(with_link(with_link(healthy(4), 0, 1, *there), 1, 0, *back))

    seen = [(one.fault, *one.nodes) for one in (*findings.pairs, *findings.lossy, *findings.unknown)]
    assert seen == ([] if expected is None else [expected])
    assert findings.is_faulty is (expected is not None and expected[0] not in ("little loss", "no answer"))
    assert findings.carries_everywhere is (expected is None or expected[0] == "little loss")


def test_datagrams_that_the_readers_own_kernel_dropped_are_not_held_against_the_network() -> None:
    answers = with_link(healthy(4), 0, 1, "good", (180, 185))

    assert found(answers).lossy
    assert not found({**answers, 1: replace(answers[1], num_dropped=35)}).lossy


def test_datagrams_that_were_lost_before_the_first_arrived_are_not_held_against_the_network() -> None:
    """A network may drop packets until it has found the way."""
    answers = with_link(healthy(4), 0, 1, "good", (160, 161))

    assert found(answers).lossy
    assert not found({**answers, 1: replace(answers[1], missed={0: 79})}).lossy


def test_a_node_whose_process_stands_still_is_not_blamed_and_its_links_are_not_known() -> None:
    answers = healthy(4)
    for other in (0, 1, 2):
        answers = with_link(with_link(answers, 3, other, "large", ALL), other, 3, "small", ALL)

    findings = found(answers)

    assert (findings.is_faulty, findings.carries_everywhere, len(findings.unknown), findings.num_pairs) == (
        False,
        False,
        3,
        3,
    )
    assert findings.words.startswith(
        "3 pairs of nodes reach each other on the network of 10.2.0.1; nothing is known of"
    )


def test_a_node_that_takes_no_connections_but_makes_them_is_named_by_its_pairs_only() -> None:
    answers = healthy(4)
    for other in (0, 1, 2):
        answers = with_link(answers, other, 3, "connect", ALL)

    findings = found(answers)

    assert (findings.bad_nodes, len(findings.unexplained_pairs)) == ((), 3)


def test_only_a_node_that_two_probes_find_bad_is_bad() -> None:
    answers = healthy(4)
    for other in (0, 1, 3):
        answers = cut(answers, 2, other)
    bad, well, unknown = found(answers), found(healthy(4)), replace(found(healthy(4)), problem="srun failed")
    off = found({**healthy(4), 1: NodeLinkReport(is_whole=True)})

    assert confirm_findings(bad, bad) == replace(bad, seconds=2.0)
    assert confirm_findings(bad, well) == replace(well, seconds=2.0)
    for again in (None, unknown):
        assert (confirm_findings(bad, again).bad_nodes, len(confirm_findings(bad, again).unexplained_pairs)) == ((), 3)
    assert (confirm_findings(off, off).bad_nodes, confirm_findings(off, off).silent) == (("node2",), ())
    for one in (confirm_findings(off, None), confirm_findings(bad, off)):
        assert (one.bad_nodes, one.off_network, one.silent, one.carries_everywhere) == ((), (), ("node2",), False)


def test_a_node_that_does_not_answer_is_said_apart_and_not_taken_for_bad() -> None:
    answers = healthy(4)
    for other in (0, 1, 2):
        answers = cut(answers, 3, other)

    for silent in ({key: value for key, value in answers.items() if key != 3}, {**answers, 3: NodeLinkReport()}):
        findings = found(silent)

        assert (findings.silent, findings.bad_nodes, findings.num_pairs, findings.carries_everywhere) == (
            ("node4",),
            (),
            3,
            False,
        )
        assert "node4 did not answer in time over Slurm's network, so nothing is known of their links" in findings.words


def test_a_node_without_an_address_on_the_network_is_named() -> None:
    findings = found({**healthy(4), 2: NodeLinkReport(is_whole=True)})

    assert (findings.bad_nodes, findings.off_network, findings.num_pairs) == (("node3",), ("node3",), 3)
    assert "node3 has no address of its own on the network of 10.2.0.1" in findings.words


def test_a_node_that_could_not_listen_for_another_reason_is_not_known() -> None:
    findings = found({**healthy(4), 2: NodeLinkReport()})

    assert (findings.bad_nodes, findings.silent) == ((), ("node3",))


def test_rank_zeros_own_interface_may_be_the_one_that_is_down() -> None:
    answers = {**healthy(4), 0: NodeLinkReport(address="10.1.0.1", network="10.1.0.0/24", is_whole=True)}

    assert found(answers).bad_nodes == ("node1",)


def in_racks(answers: dict[int, NodeLinkReport], size: int) -> dict[int, NodeLinkReport]:
    """Give each rack a subnet of its own."""
    return {
        number: replace(answer, address=f"10.2.{number // size}.{number + 1}", network=f"10.2.{number // size}.0/24")
        for number, answer in answers.items()
    }


@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_a_routed_network_no_node_of_another_subnet_is_blamed(size: int) -> None:
    findings = found(in_racks(healthy(6), size), 6)

    assert (findings.carries_everywhere, findings.num_pairs) == (True, 15)


def test_in_a_routed_network_the_node_that_no_other_reaches_is_named() -> None:
    answers = in_racks(healthy(6), 3)
    for other in (0, 1, 2, 3, 5):
        answers = cut(answers, 4, other)

    assert found(answers, 6).bad_nodes == ("node5",)


@pytest.mark.parametrize("address", ["198.51.100.7", "head.example.org"])
def test_an_address_that_no_node_has_itself_blames_none(address: str) -> None:
    """MASTER_ADDR may be a name, or an address that a router translates."""
    names = [f"node{number + 1}" for number in range(4)]

    assert findings_of(names, healthy(4), address=address, at=0.0, seconds=1.0).carries_everywhere


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    findings = found(with_link(cut(healthy(4), 0, 2), 1, 3, "good", (197, 199)))

    write_network(run, 3, findings)

    assert read_network(run, 3) == findings
    assert read_network(run, 4) is None
    for text in ("", "[]", '{"at": 1}', '{"pairs": 3}', '{"pairs": [{"nodes": ["a"]}]}'):
        run.network(3).write_text(text)
        assert read_network(run, 3) is None


def test_many_pairs_are_not_all_spelled_out() -> None:
    pairs = tuple(PairFault(nodes=(f"a{n}", f"b{n}"), fault="nothing passes") for n in range(200))

    findings = NetworkFindings(at=0, seconds=1, address=ADDRESS, num_nodes=512, num_pairs=4000, pairs=pairs)

    assert findings.words.endswith("no packet passes between a5 and b5; and 194 more")
    assert len(findings.words) < 400


def test_processes_that_listen_on_this_machine_reach_each_other() -> None:
    findings = probe_network(["a", "b", "c"], "127.0.0.1", step_argv=lambda nodes: step_argv(dict.fromkeys(nodes, "")))

    assert (findings.carries_everywhere, findings.num_pairs, findings.silent) == (True, 3, ())


@pytest.mark.parametrize("command", [["/does/not/exist"], ["false"], [sys.executable, "-c", "print('hello')"]])
def test_where_no_step_can_be_started_nothing_is_known(command: list[str]) -> None:
    findings = probe_network(["a", "b"], "127.0.0.1", step_argv=lambda _: command)

    assert (findings.is_faulty, findings.carries_everywhere, findings.silent) == (False, False, ("a", "b"))
    assert findings.words.startswith("the network between the nodes could not be probed: ")
