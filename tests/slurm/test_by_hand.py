"""What docs/comparison.md ("By hand") says of a training made of PyTorch, submitit and DCP alone."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.slurm.cluster import USER, Cluster
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode

pytestmark = pytest.mark.long

EXAMPLE = ROOT / "examples" / "by_hand.py"

FAST = ("--interface=ib0",)


def submit(place: LoginNode, *words: str) -> str:
    """Submit the example; return its job's number."""
    shutil.copy(EXAMPLE, place.folder)
    shutil.chown(place.folder / EXAMPLE.name, USER, USER)
    done = place.cluster.run(
        sys.executable, EXAMPLE.name, "--submit", "--nodes", "2", *words, cwd=place.folder, timeout=120
    )
    return done.stdout.split()[-1]


def state(cluster: Cluster, job_id: str) -> str:
    return cluster.run("sacct", "-X", "-n", "-j", job_id, "-o", "state%30").stdout.split()[-1]


def test_a_preempted_job_saves_goes_back_into_the_queue_and_finishes(cluster: Cluster, place: LoginNode) -> None:
    job_id = submit(place, *FAST, "--partition=low", "--epochs=6", "--save-every=1000000")
    log = place.folder / "by-hand" / "submitit" / f"{job_id}_0_log.out"
    cluster.wait_for(lambda: log.exists() and "epoch 1 " in log.read_text(), 180)

    cluster.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    cluster.wait_for(lambda: [*(place.folder / "by-hand").glob("step-????????")], 60)
    cluster.wait_for(lambda: state(cluster, job_id) == "COMPLETED", 240)

    epochs = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("epoch")]
    assert sorted({*map(int, epochs)}) == [*range(6)]
    assert len(epochs) == 6  # no step was trained twice


def test_a_killed_rank_ends_the_job_and_nobody_starts_it_again(cluster: Cluster, place: LoginNode) -> None:
    job_id = submit(place, *FAST, "--epochs=100000")
    log = place.folder / "by-hand" / "submitit" / f"{job_id}_0_log.out"
    cluster.wait_for(lambda: log.exists() and "epoch 1 " in log.read_text(), 180)

    cluster.run("pkill", "--signal", "KILL", "--oldest", "--full", "submitit.core._submit", node="node2")
    cluster.wait_for(lambda: state(cluster, job_id) not in {"RUNNING", "COMPLETING"}, 120)

    assert state(cluster, job_id) == "FAILED"
    assert cluster.run("squeue", "-h", "-j", job_id, check=False).stdout == ""


def test_ranks_do_not_meet_where_a_nodes_own_name_means_loopback_unless_the_network_is_named(
    cluster: Cluster, place: LoginNode
) -> None:
    job_id = submit(place, "--epochs=2")
    logs = place.folder / "by-hand" / "submitit"

    cluster.wait_for(
        lambda: any("Gloo connectFullMesh failed" in log.read_text() for log in logs.glob(f"{job_id}_*_log.err")), 180
    )

    cluster.run("scancel", job_id)
