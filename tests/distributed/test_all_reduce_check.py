"""An all-reduce between real processes: right sums pass, a wrong number and a node that does not come are found."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress

import pytest

from ddp_hpc.node_checks.collectives import ALL, DONE, NodeReport, findings_of, report_of
from ddp_hpc.run_dir.preflight import Finding
from ddp_hpc.slurm.answers import read_answers
from tests.distributed.node_networks import Nodes, why_not
from tests.distributed.node_networks import made as networks

MODULE = "ddp_hpc.train.all_reduce_check"
SPOILED = f"""
import runpy, torch.distributed as dist
real = dist.all_reduce

def spoiled(numbers, **options):
    if numbers.numel() > 1:
        numbers[7] += 1  # as a bit does that memory has turned
    return real(numbers, **options)

dist.all_reduce = spoiled
runpy.run_module({MODULE!r}, run_name="__main__")
"""
"""A node that gives another number than it should."""


def made(nodes: Sequence[str], *, spoiled: str = "", absent: str = "", limit_s: float = 100) -> dict[str, NodeReport]:
    """Run one process a node, and return their reports."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    words = [
        *(f"--node={node}" for node in nodes),
        "--address=127.0.0.1",
        f"--port={port}",
        "--backend=gloo",
        "--mark=m",
    ]
    started = {
        node: subprocess.Popen(
            [
                sys.executable,
                *(["-c", SPOILED] if node == spoiled else ["-m", MODULE]),
                *words,
                f"--name={node}",
                f"--limit={limit_s}",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for node in nodes
        if node != absent
    }
    try:
        printed = "".join(process.communicate(timeout=150)[0] for process in started.values())
    finally:
        for process in started.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
    told = {node: report_of(plain) for node, plain in read_answers(printed, "m").items()}
    return {node: report for node, report in told.items() if report is not None}


def found(nodes: Sequence[str], reports: dict[str, NodeReport]) -> Finding:
    (only,) = findings_of(nodes, reports)
    return only


@pytest.mark.long
def test_the_sums_of_two_processes_are_right() -> None:
    reports = made(["n0", "n1"])

    assert found(["n0", "n1"], reports).level == "ok", reports
    assert {report.stage for report in reports.values()} == {DONE}
    assert reports["n0"].pairs["n1"].mb_per_s == reports["n1"].pairs["n0"].mb_per_s > 0


@pytest.mark.long
def test_the_node_that_gives_a_wrong_number_is_named() -> None:
    nodes = ["n0", "n1", "n2"]

    told = found(nodes, made(nodes, spoiled="n1"))

    assert (told.level, told.nodes) == ("fail", ("n1",)), told
    assert "pairs with wrong sums: n0 - n1; n1 - n2" in told.found


@pytest.mark.long
def test_a_node_that_does_not_come_is_named_and_the_others_end() -> None:
    nodes = ["n0", "n1", "n2"]

    reports = made(nodes, absent="n1", limit_s=30)

    assert {report.stage for report in reports.values()} == {ALL}
    assert found(nodes, reports).nodes == ("n1",)


ASKED = f"""
import os, {MODULE} as check
shown = lambda *_, **__: os.write(1, " ".join(os.environ[f"{{name}}_SOCKET_IFNAME"] for name in ("NCCL", "GLOO")).encode())
check.Check.run = shown
check.main()
"""
"""Says by which interface the exchange would go, and makes none."""


def test_the_exchange_goes_by_the_very_interface_of_the_run() -> None:
    """NCCL takes a name without `=` as the beginning of names: `eth1` is `eth10`, too."""
    words = ["--node=n0", "--name=n0", "--address=127.0.0.1", "--port=1", "--backend=gloo", "--mark=m"]

    told = subprocess.run([sys.executable, "-c", ASKED, *words], capture_output=True, text=True, check=True).stdout

    assert told.startswith("=lo lo"), told


HURRIED = f"""
import sys
import {MODULE} as check
check.GLOO_WHOLE_S = 10.0
sys.exit(check.main())
"""


def made_in(nodes: Nodes) -> dict[str, NodeReport]:
    """Run one process in each namespace, and return their reports."""
    words = [*(f"--node={name}" for name in nodes.namespaces), "--address=10.213.0.1", "--port=29512"]
    argv = [sys.executable, "-c", HURRIED, *words, "--backend=gloo", "--mark=m", "--limit=85"]
    started = [
        subprocess.Popen(["ip", "netns", "exec", own, *argv, f"--name={name}"], stdout=subprocess.PIPE, text=True)
        for name, own in nodes.namespaces.items()
    ]
    printed = "".join(process.communicate(timeout=200)[0] for process in started)
    return {node: report for node, plain in read_answers(printed, "m").items() if (report := report_of(plain))}


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with networks(4) as made_up:
        yield made_up


@pytest.mark.long
def test_over_a_slow_link_less_is_sent_and_its_node_is_named(nodes: Nodes) -> None:
    """The full tensors would take minutes."""
    shape = ("qdisc", "add", "dev", "fab0", "root", "tbf", "rate", "2mbit", "burst", "16kb", "latency", "5s")
    nodes.tc("node3", *shape)

    finding = found([*nodes.namespaces], made_in(nodes))

    assert (finding.level, finding.nodes) == ("warn", ("node3",)), finding
    assert "the slowest node node3" in finding.found


@pytest.mark.long
def test_an_exchange_that_does_not_end_leaves_the_others_their_time(nodes: Nodes) -> None:
    nodes.drop_from("node2", "node4")
    nodes.drop_from("node4", "node2")

    finding = found([*nodes.namespaces], made_in(nodes))

    assert (finding.level, finding.nodes) == ("fail", ()), finding
    assert "measured: 5 of 6 pairs" in finding.found
    assert "not measured: node2 - node4" in finding.found
