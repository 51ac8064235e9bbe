"""torchrun's agents meet at a fixed place, on one address, and load nothing that a stranger has put into their store."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from tests.unit.test_worker_env import free_port

PATIENCE_S = 240.0
SCRIPT = """
import os, pathlib, sys, time, torch, torch.distributed as dist
here = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
(here / f"met-{rank}-{restart}").touch()
while not (here / "go").exists():
    time.sleep(0.02)
if (rank, restart) == ("1", "0") and "dies" in sys.argv:
    os._exit(9)
total = torch.ones(1)
dist.all_reduce(total)
(here / f"sum-{rank}").write_text(str(total.item()))
dist.destroy_process_group()
"""


class Planted:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


Torchrun = Callable[..., list[subprocess.Popen[bytes]]]


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    """Start one agent of torchrun for each node, all on this machine; at the end, kill those that are left."""
    started: list[subprocess.Popen[bytes]] = []
    (tmp_path / "script.py").write_text(SCRIPT)

    def start(*words: str, nodes: int, endpoint: str, dies: bool = False) -> list[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "ddp_hpc.train.torchrun", f"--nnodes={nodes}", "--nproc-per-node=1", *words]
        script = [str(tmp_path / "script.py"), str(tmp_path), *(["dies"] if dies else [])]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        for rank in range(nodes):
            where = [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=rank={rank}"]
            started.append(subprocess.Popen([*argv, *where, *script], env=environ))
        return started

    yield start
    for agent in started:
        if agent.poll() is None:
            for child in psutil.Process(agent.pid).children(recursive=True):
                child.kill()
            agent.kill()
            agent.wait()


def until_met(place: Path, num_ranks: int, *, restart: int = 0) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all((place / f"met-{rank}-{restart}").exists() for rank in range(num_ranks)):
        assert time.monotonic() < deadline, "the ranks should have met by now"
        time.sleep(0.02)


def overwrite(place: Path, port: int, num_nodes: int) -> None:
    """Put what would make the file `ran` where it is unpickled in the place of all that the agents exchange."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    ours = [f"none/torchelastic/{what}/{rank}" for what in ("role_info", "assigned_ranks") for rank in range(num_nodes)]
    keys = [*ours, "torch.rendezvous.none"]  # the last one is where torchrun's own rendezvous has its pickle
    assert store.check(ours)
    pickled = pickle.dumps(Planted(place / "ran"))
    for key in keys:
        for value in (pickled, base64.b64encode(pickled)):
            store.set(key, value.decode("latin-1"))


@pytest.mark.long
def test_a_stranger_who_overwrites_the_agents_keys_runs_no_code_and_the_run_ends_well(
    torchrun: Torchrun, tmp_path: Path
) -> None:
    port = free_port()
    agents = torchrun(nodes=2, endpoint=f"127.0.0.1:{port}")
    until_met(tmp_path, 2)
    overwrite(tmp_path, port, 2)
    (tmp_path / "go").touch()

    codes = [agent.wait(timeout=PATIENCE_S) for agent in agents]

    assert codes == [0, 0]
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["2.0", "2.0"]
    assert not (tmp_path / "ran").exists()


def listening(process: psutil.Process) -> list[Any]:
    """Return the addresses at which a process listens."""
    return [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]


@pytest.mark.long
def test_a_single_node_listens_on_loopback_alone_where_a_stranger_who_overwrites_its_keys_runs_no_code(
    torchrun: Torchrun, tmp_path: Path
) -> None:
    (agent,) = torchrun(nodes=1, endpoint="127.0.0.1:0")
    until_met(tmp_path, 1)
    node = psutil.Process(agent.pid)
    (store,) = listening(node)
    at = {address.ip for process in [node, *node.children(recursive=True)] for address in listening(process)}
    overwrite(tmp_path, store.port, 1)
    (tmp_path / "go").touch()

    assert agent.wait(timeout=PATIENCE_S) == 0
    assert at <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert (tmp_path / "sum-0").read_text() == "1.0"
    assert not (tmp_path / "ran").exists()


@pytest.mark.long
def test_the_agents_of_two_nodes_start_their_workers_again_as_often_as_asked(
    torchrun: Torchrun, tmp_path: Path
) -> None:
    agents = torchrun("--max-restarts=1", nodes=2, endpoint=f"127.0.0.1:{free_port()}", dies=True)
    until_met(tmp_path, 2)
    (tmp_path / "go").touch()

    assert [agent.wait(timeout=PATIENCE_S) for agent in agents] == [0, 0]
    until_met(tmp_path, 2, restart=1)


@pytest.mark.long
def test_a_node_whose_own_name_means_another_address_is_reached_by_its_name(torchrun: Torchrun, tmp_path: Path) -> None:
    agents = torchrun(nodes=2, endpoint=f"localhost:{free_port()}")
    (tmp_path / "go").touch()

    assert [agent.wait(timeout=PATIENCE_S) for agent in agents] == [0, 0]


@pytest.mark.long
def test_a_port_that_is_taken_ends_the_agent(torchrun: Torchrun, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (agent,) = torchrun(nodes=1, endpoint=f"127.0.0.1:{port}")

        assert agent.wait(timeout=PATIENCE_S) == 1
