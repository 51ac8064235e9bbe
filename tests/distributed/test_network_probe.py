"""Nodes in namespaces of their own probe a network that is broken in the ways in which networks break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

from tests.distributed.node_networks import Nodes, made, pull, why_not

pytestmark = pytest.mark.long


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with made(4) as nodes:
        yield nodes


def black_hole(nodes: Nodes) -> None:
    nodes.drop_from("node2", "node4")
    nodes.drop_from("node4", "node2")


def lost_at_random(nodes: Nodes) -> None:
    nodes.drop_from("node3", "node1", "-m", "statistic", "--mode", "random", "--probability", "0.7")


def large_packets(nodes: Nodes) -> None:
    nodes.drop_from("node1", "node2", "-m", "length", "--length", "1400:65535")


def two_groups(nodes: Nodes) -> None:
    for one, other in (("node1", "node3"), ("node1", "node4"), ("node2", "node3"), ("node2", "node4")):
        nodes.drop_from(one, other)


def interface_down(nodes: Nodes) -> None:
    nodes.ip("node3", "link", "set", "fab0", "down")


def address_gone(nodes: Nodes) -> None:
    """Rank zero's own address is gone, and the kernel routes to it by another interface."""
    nodes.ip("node1", "link", "set", "fab0", "down")
    nodes.ip("node1", "addr", "flush", "dev", "fab0")


BROKEN: list[tuple[Callable[[Nodes], None], str, str]] = [
    (black_hole, "node2 - node4", "nothing passes"),
    (lambda nodes: nodes.drop_from("node3", "node1"), "node1 - node3", "one way"),
    (lambda nodes: pull(nodes, "node2"), "node2", "nothing passes"),
    (large_packets, "node2 - node1", "large packets"),
    (lost_at_random, "node1 - node3", "loss"),
    (two_groups, "node3 - node1, node4 - node1, node3 - node2, node4 - node2", "one way"),
    (interface_down, "node3", ""),
    (address_gone, "node1", ""),
]


@pytest.mark.parametrize(("begin", "named", "fault"), BROKEN)
def test_what_the_network_does_not_carry_is_named(
    nodes: Nodes, begin: Callable[[Nodes], None], named: str, fault: str
) -> None:
    begin(nodes)

    findings = nodes.probe()

    assert findings.culprits_text == named, findings
    assert {pair.fault for pair in findings.pairs} <= {fault}
    assert findings.silent == ()
    assert findings.seconds < 60


def test_a_node_that_is_cut_off_slurms_network_too_is_said_apart(nodes: Nodes) -> None:
    pull(nodes, "node4")
    nodes.drop_from("node2", "node1")

    findings = nodes.probe(unreached=["node4"], ready_s=10)

    assert (findings.culprits_text, findings.silent) == ("node1 - node2", ("node4",))


def test_nodes_of_two_racks_with_subnets_of_their_own_reach_each_other(nodes: Nodes) -> None:
    for rack, members, others in (("10.213.0", (1, 2), "10.214.0"), ("10.214.0", (3, 4), "10.213.0")):
        for number in members:
            node = f"node{number}"
            nodes.ip(node, "addr", "flush", "dev", "fab0")
            nodes.ip(node, "addr", "add", f"{rack}.{number}/24", "dev", "fab0")
            nodes.ip(node, "route", "add", f"{others}.0/24", "dev", "fab0", "src", f"{rack}.{number}")

    findings = nodes.probe()

    assert (findings.carries_everywhere, findings.num_pairs) == (True, 6), findings


def test_packets_that_are_lost_before_the_network_has_found_the_way_blame_no_node(nodes: Nodes) -> None:
    for other in ("node1", "node2", "node3"):
        nodes.drop_from(other, "node4", "-p", "udp", "-m", "quota", "--quota", "32000")

    findings = nodes.probe()

    assert (findings.carries_everywhere, findings.lossy) == (True, ()), findings


def test_a_probe_process_that_stands_still_blames_no_node(nodes: Nodes) -> None:
    def stop_and_go() -> None:
        """Wait until node4's process serves the others, in threads; stop it for longer than they wait for it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if "--name=node4" in process.cmdline() and process.num_threads() > 3:
                        process.suspend()
                        stopped.append(process.pid)
                        time.sleep(6.0)
                        process.resume()
                        return
            time.sleep(0.01)

    stopped: list[int] = []
    thread = threading.Thread(target=stop_and_go)
    thread.start()
    findings = nodes.probe()
    thread.join()

    assert stopped
    assert not findings.is_faulty, findings
