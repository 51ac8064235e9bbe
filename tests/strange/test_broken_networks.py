"""Probes of networks, nodes and sites that the authors did not have in mind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base import processes
from ddp_hpc.cluster.rendezvous.links.findings import NodeLinkReport, findings_of
from ddp_hpc.cluster.rendezvous.links.probe import NUM_DATAGRAMS, NodeProbe, Sockets
from ddp_hpc.cluster.rendezvous.links.rounds import rounds_of
from ddp_hpc.job.ending import network_probe
from tests.distributed.node_networks import step_argv

ALL = (NUM_DATAGRAMS, NUM_DATAGRAMS)


def wrapped(nodes: Sequence[str], before: str) -> list[str]:
    """Return the command of a step whose nodes do something first, by a shell."""
    script = f'{before}; exec "$@"'
    return [*step_argv(dict.fromkeys(nodes, "")), "sh", "-c", script, "task"]


def test_a_task_prolog_that_prints_json_and_half_a_line_is_passed_over() -> None:
    noise = """printf '{"ready": "a", "error": "no"}\\n[1, 2]\\n{"mark": "x"}\\nLoading modules ...'"""

    findings = network_probe.probe_network(["a", "b"], "127.0.0.1", step_argv=lambda nodes: wrapped(nodes, noise))

    assert findings.carries_everywhere


def test_a_node_that_ends_after_it_has_answered_is_said_not_to_be_known() -> None:
    dies = 'case "$*" in *--name=c*) (sleep 2; kill -9 $$) & ;; esac'

    def argv(nodes: Sequence[str]) -> list[str]:
        # Node c is killed about when the probe begins: before, amid or after it, it is never taken for cut off.
        return wrapped(nodes, dies)

    findings = network_probe.probe_network(["a", "b", "c"], "127.0.0.1", step_argv=argv)

    assert findings.bad_nodes == ()
    assert findings.carries_everywhere or findings.silent == ("c",)


@pytest.mark.long
def test_a_node_that_never_answers_does_not_keep_the_others_from_being_probed() -> None:
    sleeps = 'case "$*" in *--name=b*) exec sleep 60 ;; esac'

    findings = network_probe.probe_network(
        ["a", "b", "c"], "127.0.0.1", step_argv=lambda nodes: wrapped(nodes, sleeps), ready_s=6.0
    )

    assert (findings.silent, findings.num_pairs, findings.is_faulty) == (("b",), 1, False)


def test_the_network_may_have_ipv6_only() -> None:
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        findings = network_probe.probe_network(
            ["a", "b"], "::1", step_argv=lambda nodes: step_argv(dict.fromkeys(nodes, ""))
        )
        assert findings.carries_everywhere, findings
        return
    pytest.skip("this machine has no IPv6 loopback")


def test_strangers_are_neither_answered_nor_counted_and_do_not_keep_partners_out() -> None:
    sockets = [Sockets.open("127.0.0.1") for _ in range(2)]
    places = {number: ("127.0.0.1", one.port) for number, one in enumerate(sockets)}
    probes = [NodeProbe(one, number, b"t" * 16, places, 2) for number, one in enumerate(sockets)]
    probes[0].serve()
    probes[1].serve()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as noise, socket.create_connection(places[0]) as guest:
        noise.sendto(b"", places[0])
        noise.sendto(b"x" * 300, places[0])
        noise.sendto(b"u" * 16 + b"\0\1\0\0\0", places[0])
        silent = [socket.create_connection(places[0]) for _ in range(10)]  # they say nothing at all
        guest.sendall(b"GET / HTTP/1.0\r\n\r\n" * 4)
        answer = b""
        with suppress(ConnectionResetError):
            guest.settimeout(30)
            answer = guest.recv(100)

        probes[1].probe_all()

    for link in silent:
        link.close()
    for one in sockets:
        one.close()
    assert answer == b""
    assert probes[1].tcp == {0: "good"}
    assert probes[0].heard == {(1, False): NUM_DATAGRAMS, (1, True): NUM_DATAGRAMS}


def test_a_stop_signal_ends_a_probe_early_and_is_kept_for_the_supervisor() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    began = time.monotonic()
    try:
        # To this thread: other threads of the tests' process do not block it.
        threading.Timer(1.0, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2)).start()
        network_probe.probe_network(
            ["a", "b"], "127.0.0.1", step_argv=lambda nodes: wrapped(nodes, "sleep 60"), ready_s=50.0
        )

        assert processes.is_stop_pending()
        assert signal.sigtimedwait([signal.SIGUSR2], 10) is not None
        assert time.monotonic() - began < 40  # it would wait for 50 s
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_nodes_of_one_image_that_share_an_address_are_not_taken_for_each_other() -> None:
    answers = {number: answer(number, 3) for number in range(3)}
    answers[2] = replace(
        answers[2], address="10.2.0.1"
    )  # it reaches itself under rank zero's address, and so all is good

    findings = findings_of(["a", "b", "c"], answers, address="10.2.0.1", at=0.0, seconds=1.0)

    assert (findings.bad_nodes, findings.num_pairs) == (("c",), 1)


def answer(number: int, num_nodes: int, partners: Sequence[int] | None = None) -> NodeLinkReport:
    others = [one for one in range(num_nodes) if one != number] if partners is None else partners
    return NodeLinkReport(
        address=f"10.2.{number // 250}.{number % 250 + 1}",
        network="10.2.0.0/16",
        tcp=dict.fromkeys(others, "good"),
        heard=dict.fromkeys(others, ALL),
        is_whole=True,
    )


def test_of_512_nodes_two_bad_ones_a_bad_pair_and_a_silent_one_are_found_with_18_partners_each() -> None:
    partners: dict[int, list[int]] = {number: [] for number in range(512)}
    for low, high in (pair for pairs in rounds_of(512) for pair in pairs):
        partners[low].append(high)
        partners[high].append(low)
    answers = {number: answer(number, 512, partners[number]) for number in range(512) if number != 300}
    bad = [(7, other) for other in partners[7]] + [(8, other) for other in partners[8]] + [(100, 101)]
    for one, other in bad:
        for here, there in ((one, other), (other, one)):
            found = answers[here]
            answers[here] = replace(found, tcp={**found.tcp, there: "connect"}, heard={**found.heard, there: (0, 0)})

    findings = findings_of([f"n{number}" for number in range(512)], answers, address="10.2.0.1", at=0.0, seconds=1.0)

    assert findings.culprits_text == "n7, n8, n100 - n101"
    assert findings.silent == ("n300",)
    assert max(map(len, partners.values())) <= 18


def test_a_probe_whose_supervisor_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    code = (
        "import json, sys; from ddp_hpc.job.ending import network_probe as p; from tests.distributed.node_networks import step_argv; "
        f"p.probe_network(['a', 'b'], '127.0.0.1', step_argv=lambda nodes: ['sh', '-c', 'echo $$ > {tmp_path}/step; exec sleep 600'], ready_s=50)"
    )
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(Path.cwd())})
    step = tmp_path / "step"
    deadline = time.monotonic() + 60
    while not (step.exists() and step.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    number = int(step.read_text())
    while Path(f"/proc/{number}/stat").exists() and " Z " not in Path(f"/proc/{number}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
