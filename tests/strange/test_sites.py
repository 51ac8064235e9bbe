"""Nodes that print greetings, that do not answer, and whose processes see more than their job was given."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.cluster.slurm.allocation import Allocation, read_allocation
from ddp_hpc.job.choose_endpoint import endpoints_to_try
from tests.unit.made_network import batch

PutSrun = Callable[[str], None]

GREETING = r"printf 'Welcome to the cluster! \351\n{\"node\": 1}\nLast login: today'"
"""As a TaskProlog or a module prints it: bytes of another locale, what looks like JSON, a last line without its end."""


@pytest.fixture
def put_srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PutSrun:
    """Return how to have an srun that does this with the command it is given, as `$@`; its output is cut as srun's."""

    def put(text: str) -> None:
        path = tmp_path / "bin" / "srun"
        path.parent.mkdir(exist_ok=True)
        skip = 'while [ "${1#-}" != "$1" ]; do shift; done'
        path.write_text(f"#!/bin/sh\n{skip}\n{{ {text}; }} | LC_ALL=C fold --bytes --width=1024\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return put


def allocation(on: str = "node1") -> Allocation:
    found = read_allocation(batch("node[1-2]", "1(x2)", on=on))
    assert found is not None
    return found


def on_node(name: str) -> str:
    return f'{GREETING}; SLURMD_NODENAME={name} "$@"'


def first_place(of: Allocation) -> str:
    return next(iter(endpoints_to_try(of, attempt=0, environ={**os.environ}))).address


def test_greetings_of_the_nodes_are_no_answer(put_srun: PutSrun, capfd: pytest.CaptureFixture[str]) -> None:
    """Asked from a node that is not the first, so that all answers count."""
    put_srun(f"{on_node('node2')}; {on_node('node1')}")

    place = first_place(allocation(on="node2"))

    said = capfd.readouterr().err
    assert f"ranks meet at {place}" in said
    assert "did not say" not in said


def test_a_node_that_does_not_answer_is_named_and_the_ranks_meet_all_the_same(
    put_srun: PutSrun, capfd: pytest.CaptureFixture[str]
) -> None:
    put_srun(f"{on_node('node1')}; echo 'srun: error: node2: no such Python' >&2; exit 1")

    place = first_place(allocation(on="node2"))

    said = capfd.readouterr().err
    assert f"ranks meet at {place}" in said
    assert "note: node2 did not answer which networks they have (srun: error: node2: no such Python)" in said


def test_where_nobody_knows_an_address_of_rank_zeros_node_the_attempt_fails_with_what_to_do(put_srun: PutSrun) -> None:
    """`.invalid` is no name anywhere (RFC 2606); the batch host is not the first node, so its own networks do not help."""
    put_srun("exit 1")
    environ = batch("zero.invalid,other.invalid", "1(x2)", on="other.invalid")
    found = read_allocation(environ)
    assert found is not None

    with pytest.raises(WorkerError, match="Set MASTER_ADDR"):
        first_place(found)


def test_a_profile_that_exports_localhost_as_master_addr_is_right_for_one_node_and_refused_for_two() -> None:
    environ = {**os.environ, "MASTER_ADDR": "localhost"}
    alone = read_allocation(batch("node1", "4"))
    assert alone is not None

    assert next(iter(endpoints_to_try(alone, attempt=0, environ=environ))).address in {"127.0.0.1", "::1"}
    with pytest.raises(ConfigError, match="no address that other nodes can reach"):
        next(iter(endpoints_to_try(allocation(), attempt=0, environ=environ)))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make network namespaces")
def test_nodes_with_twenty_interfaces_meet_where_all_of_them_are(
    put_srun: PutSrun, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each node has a network namespace; its answer is three times as long as a line that srun passes on."""
    nodes = []
    for number in (1, 2):
        words = ["ip link set lo up"]
        for one in range(10):
            address = f"10.77.0.{number}" if one == 7 else f"10.{100 + one}.{number}.1"
            words.append(f"ip link add hca{one} type veth peer name hcb{one}; ip addr add {address}/24 dev hca{one}")
            words.append(f"ip link set hca{one} up; ip link set hcb{one} up")
        run = f'SLURMD_NODENAME=node{number} unshare --net sh -c \'{"; ".join(words)}; exec "$@"\' sh "$@"'
        nodes.append(f"{GREETING}; {run}")
    put_srun("; ".join(nodes))

    place = first_place(allocation(on="node2"))

    assert place == "10.77.0.1"
    assert "the fastest network that all 2 nodes are on: 10.77.0.0/24" in capfd.readouterr().err
