"""Users of other launchers: one node only, a module of the user's that is called as one of Python's, a start that never happens."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base.errors import WorkerError
from ddp_hpc.cluster.rendezvous.launchers import RankPlace, find_place
from ddp_hpc.cluster.rendezvous.ports import candidate_ports, is_free
from ddp_hpc.job.node.join_attempt import gather_at_port
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_rendezvous_token
from tests.distributed.whole_runs import make_workplace
from tests.unit.made_network import LO, host

TEXT = """
recipe: {target: "trial_recipe:build", args: {num_samples: 24}}
train: {max_steps: 2, global_batch_size: 4}
"""
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "0",
    "SKYPILOT_NODE_IPS": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def place_of(rank: int, world_size: int, port: int) -> RankPlace:
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    place = find_place(environ, None, host([LO]))
    assert place is not None
    return place


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "one").mkdir()
    return RunDir(tmp_path / "one")


@pytest.fixture
def port() -> int:
    return next(port for port in candidate_ports(str(time.monotonic_ns())) if is_free("127.0.0.1", port))


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH is new in Python 3.11")
def test_one_node_with_one_worker_trains_beside_a_json_py_of_the_users(tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path, TEXT)
    (tmp_path / "json.py").write_text("raise RuntimeError('this is not what was asked for')\n")
    command = [
        str(Path(sys.executable).parent / "ddp-hpc"),
        "join",
        "trial.yaml",
    ]  # `python -m` would import that json.py itself

    done = subprocess.run(
        command, cwd=tmp_path, env={**workplace.environ, **SKYPILOT}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert Ledger.read(workplace.run("trial")).attempts[-1].ending == "finished"


def test_strangers_that_knock_at_the_port_count_as_no_worker_and_keep_none_waiting(port: int, run: RunDir) -> None:
    answers: list[tuple[int, int | None]] = []
    words = (b"GET / HTTP/1.1\r\n\r\n", b"1 0123456789abcdef0123456789abcdef\n", *[b""] * 300)

    def second() -> None:
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in words]
        for stranger, said in zip(strangers, words, strict=True):
            stranger.sendall(said)
        answers.append(gather_at_port(place_of(1, 2, port), "127.0.0.1", lambda: 0, run=run, patience_s=30))
        for stranger in strangers:
            stranger.close()

    def second_when_the_first_listens() -> None:
        while is_free("127.0.0.1", port):
            time.sleep(0.01)
        second()

    thread = threading.Thread(target=second_when_the_first_listens)
    thread.start()
    attempt, listen_fd = gather_at_port(place_of(0, 2, port), "127.0.0.1", lambda: 3, run=run, patience_s=30)
    thread.join()

    assert attempt == 3
    assert answers == [(3, None)]
    assert listen_fd is not None
    with socket.socket(fileno=listen_fd) as listening:
        assert listening.getsockname() == ("127.0.0.1", port)
        assert listening.getblocking()


def test_a_rank_that_never_comes_is_named(port: int, run: RunDir) -> None:
    with pytest.raises(WorkerError, match="these ranks did not come: 1, 2"):
        gather_at_port(place_of(0, 3, port), "127.0.0.1", lambda: 3, run=run, patience_s=0.2)


def test_a_rank_of_another_run_that_was_given_the_same_port_is_refused_and_told_why(port: int, run: RunDir) -> None:
    refusals: list[str] = []
    other = RunDir(run.path.with_name("other"))
    write_rendezvous_token(other.joining_token)

    def of_another_run() -> None:
        with pytest.raises(WorkerError) as refused:
            gather_at_port(place_of(1, 2, port), "127.0.0.1", lambda: 0, run=other, patience_s=2)
        refusals.append(str(refused.value))

    thread = threading.Thread(target=of_another_run)
    thread.start()
    with pytest.raises(WorkerError, match="these ranks did not come: 1"):
        gather_at_port(place_of(0, 2, port), "127.0.0.1", lambda: 3, run=run, patience_s=4)
    thread.join()

    assert "another run" in refusals[0]
    assert "MASTER_PORT" in refusals[0]


def test_ctrl_c_twice_ends_a_node_that_waits_for_one_that_never_comes(tmp_path: Path, port: int) -> None:
    workplace = make_workplace(tmp_path, TEXT)
    place = ("--nnodes=2", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}")
    node = subprocess.Popen(
        [sys.executable, "-m", "ddp_hpc", "join", "trial.yaml", *place],
        cwd=tmp_path,
        env=workplace.environ,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert node.stderr is not None
    with node, node.stderr:
        while not psutil.Process(node.pid).children():  # torchrun
            time.sleep(0.02)
        node.send_signal(signal.SIGINT)
        note = next(line for line in node.stderr if "Ctrl-C" in line)
        node.send_signal(signal.SIGINT)

        assert node.wait(timeout=60) == 1
    assert "ends them at once" in note
