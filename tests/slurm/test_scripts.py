"""A user's script on two nodes, as it is: by each launcher, preempted, killed, and trained to its end."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.slurm.cluster import USER, Cluster
from tests.slurm.faulty_runs import attempts, await_done, await_first_end, job_id
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode, world

SCRIPTS = ROOT / "tests" / "distributed" / "scripts"
EPOCHS, HELD_AT = 4, 2
KILL_ONE = """
import psutil, sys
ours = [one for one in psutil.process_iter(["cmdline"]) if sys.argv[1] in (one.info["cmdline"] or [])]
scripts = [child for one in ours for child in one.children() if child.cmdline()[:1] == ["python"]]
scripts[-1].kill()
"""
State = dict[str, torch.Tensor]


def epochs_of(snapshot: Path) -> int:
    """Return how many epochs the script has trained, by what it has saved."""
    return int(torch.load(snapshot)["EPOCHS_RUN"]) if snapshot.exists() else 0


def weights_of(snapshot: Path) -> State:
    state: State = torch.load(snapshot)["MODEL_STATE"]
    return state


def are_equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def trainer(login: LoginNode) -> LoginNode:
    """Return the head, with the tutorial's script in the directory that is submitted from."""
    login.add_recipe(SCRIPTS / "multinode.py")
    return login


@pytest.fixture(scope="module")
def by_torchrun(cluster: Cluster) -> tuple[State, State]:
    """Return the weights that the same script comes to under torchrun, four workers on one machine: at once, and resumed.

    They may differ in their last bits: DDP builds its buckets anew after the first step of each process, so four ranks add the
    same numbers in another order.
    """
    folder = cluster.shared / "by-torchrun"
    folder.mkdir(exist_ok=True)
    shutil.chown(folder, USER, USER)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    found = []
    for name, parts in (("at-once.pt", (EPOCHS,)), ("resumed.pt", (HELD_AT, EPOCHS))):
        for epochs in parts:
            words = [str(SCRIPTS / "multinode.py"), str(epochs), "--snapshot", name]
            # The script's DDP keeps the group to Python's end, where gloo's threads may end a rank by SIGABRT; the snapshot is
            # written by then, and the second time has nothing left to train.
            done = cluster.run(*torchrun, *words, cwd=folder, env=alone, check=False)
            if done.returncode:
                cluster.run(*torchrun, *words, cwd=folder, env=alone)
        found.append(weights_of(folder / name))
    at_once, resumed = found
    return at_once, resumed


def submit(login: LoginNode, name: str, *settings: str, hold: bool = False) -> Path:
    """Submit the script on two nodes with two workers each; return the file that it saves to."""
    keys = [f"name={name}", f"script.progress={name}.pt", "resources.cpus_per_worker=1", *world(2, 2), *settings]
    command = ["python", "multinode.py", str(EPOCHS), "--snapshot", f"{name}.pt"]
    command += ["--hold-at", str(HELD_AT)] if hold else []
    done = login.type("submit", "--cluster", "slurm", *keys, "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return login.folder / f"{name}.pt"


def await_attempt(login: LoginNode, name: str, number: int) -> None:
    """Return once the ranks of an attempt have resumed, and wait."""

    def has_resumed() -> bool:
        logs = [login.run(name).rank_log(number, rank) for rank in range(4)]
        return all(
            log.exists() and f"Resuming training from snapshot at Epoch {HELD_AT}" in log.read_text() for log in logs
        )

    try:
        login.cluster.wait_for(has_resumed, 180)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{login.console(name)}") from error


def disturb(login: LoginNode, name: str, snapshot: Path, ask: Callable[[], object]) -> None:
    """Have a script that holds at an epoch asked to stop and come back, and one of its ranks killed; let it go on then."""
    login.cluster.wait_for(lambda: epochs_of(snapshot) == HELD_AT, 180)
    ask()
    await_first_end(login, name)
    await_attempt(login, name, 1)
    login.cluster.run(sys.executable, "-c", KILL_ONE, str(login.run(name).path), node="node2", user="root")
    await_attempt(login, name, 2)
    (login.folder / "go").touch()
    await_done(login, name)


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", "srun", "torchrun"])
def test_a_script_that_is_preempted_and_killed_ends_with_the_bits_that_torchrun_gives(
    launcher: str, cluster: Cluster, trainer: LoginNode, by_torchrun: tuple[State, State]
) -> None:
    snapshot = submit(trainer, launcher, f"launcher={launcher}", "slurm.nodelist=node[1-2]", hold=True)

    disturb(trainer, launcher, snapshot, lambda: cluster.run("scancel", "--signal=TERM", job_id(trainer, launcher)))

    first, second, third = attempts(trainer, launcher)
    assert (first.cause, first.next, first.ending) == ("requeue asked", "requeue", "stopped"), first.reason
    assert (second.cause, second.next, second.ending) == ("worker crashed", "in place", "failed"), second.reason
    assert "SIGKILL" in second.reason
    assert third.cause == "finished"
    assert first.first_step < second.first_step == third.first_step < (third.last_step or 0)
    at_once, resumed = by_torchrun
    assert are_equal(weights_of(snapshot), resumed)
    assert all(torch.allclose(weights_of(snapshot)[name], at_once[name], rtol=1e-5, atol=1e-7) for name in at_once)


@pytest.mark.long
def test_an_undisturbed_script_on_two_nodes_comes_to_the_bits_that_torchrun_gives(
    trainer: LoginNode, by_torchrun: tuple[State, State]
) -> None:
    snapshot = submit(trainer, "undisturbed")

    await_done(trainer, "undisturbed")

    assert are_equal(weights_of(snapshot), by_torchrun[0])


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", "srun", "torchrun"])
def test_a_script_gets_its_own_signal_where_slurm_and_ddp_hpc_have_another(
    launcher: str, cluster: Cluster, login: LoginNode
) -> None:
    """Slurm's warning is SIGUSR2, which srun and the lab's slurmd send to all processes of a step."""
    login.add_recipe(SCRIPTS / "signals.py")
    keys = [f"name={launcher}", f"launcher={launcher}", "resources.cpus_per_worker=1", *world(2, 1)]
    command = ["python", "signals.py", "handles", "TERM", "99"]
    done = login.type("submit", "--cluster", "slurm", *keys, "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.wait_for(lambda: all((login.folder / f"ready-{rank}").exists() for rank in range(2)), 180)

    cluster.run("scancel", "--batch", "--signal=USR2", job_id(login, launcher))
    await_first_end(login, launcher)

    first = attempts(login, launcher)[0]
    assert (first.cause, first.next, first.ending) == ("requeue asked", "requeue", "stopped"), first.reason
    logs = [login.run(launcher).rank_log(0, rank).read_text() for rank in range(2)]
    assert logs == ["signalled; my child runs\n"] * 2


PLAIN = """
import pathlib, torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
while True:
    dist.all_reduce(torch.ones(1))
    pathlib.Path(f"ready-{rank}").touch()
"""


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["agent", "srun", "torchrun"])
def test_a_script_without_handlers_is_stopped_and_not_failed_though_its_ranks_lose_each_other(
    launcher: str, cluster: Cluster, login: LoginNode
) -> None:
    (login.folder / "obeys.py").write_text(PLAIN)
    keys = ["name=obeys", f"launcher={launcher}", "resources.cpus_per_worker=1", *world(2, 1)]
    done = login.type("submit", "--cluster", "slurm", *keys, "--", "python", "obeys.py")
    assert done.returncode == 0, done.stdout + done.stderr
    cluster.wait_for(lambda: all((login.folder / f"ready-{rank}").exists() for rank in range(2)), 180)

    stopped = login.type("stop", "obeys")
    await_first_end(login, "obeys")

    [only] = attempts(login, "obeys")
    assert (only.cause, only.next, only.ending) == ("stop asked", "", "stopped"), only.reason
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert "probes the network" not in login.console("obeys")


@pytest.mark.long
def test_rank_zero_may_work_alone_for_longer_than_a_minute_after_the_other_ranks_have_ended(login: LoginNode) -> None:
    (login.folder / "alone.py").write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(75)\n    print('evaluated alone')\n"
    )
    keys = ["name=alone", "launcher=srun", "resources.cpus_per_worker=1", "restart.max_no_progress=1", *world(2, 2)]

    done = login.type("submit", "--cluster", "slurm", "--wait", *keys, "--", "python", "alone.py", timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr + login.console("alone")
    assert "evaluated alone" in login.run("alone").rank_log(0, 0).read_text()
