"""The cluster is what it claims to be, so what tests on it show is worth something."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import USER, Cluster
from tests.slurm.lab import cgroups


def submit(cluster: Cluster, folder: Path, script: str, *options: str) -> str:
    """Submit a script; return the job's id. What it prints comes into `job.out`."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n")
    return cluster.run("sbatch", "--parsable", "--output=job.out", *options, path, cwd=folder).stdout.strip()


def output(cluster: Cluster, folder: Path, job: str) -> str:
    """Return what a job printed, once it is over."""
    cluster.wait_for(lambda: state(cluster, job) == "COMPLETED", 90)
    return (folder / "job.out").read_text()


def state(cluster: Cluster, job: str) -> str:
    return cluster.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T").stdout.strip()


def test_a_job_runs_as_the_user_on_a_machine_with_its_own_name_and_addresses(
    cluster: Cluster, shared_dir: Path
) -> None:
    job = submit(cluster, shared_dir, "whoami; hostname; hostname -I; ls /sys/class/net", "--nodelist=node2")

    user, hostname, addresses, *interfaces = output(cluster, shared_dir, job).splitlines()

    assert (user, hostname) == (USER, "node2")
    assert addresses.split() == ["10.77.0.12", "10.78.0.12"]
    assert sorted(interfaces) == ["eth0", "ib0", "lo"]


def test_a_nodes_name_is_the_loopback_to_itself_alone(cluster: Cluster) -> None:
    """As Debian's installer leaves it: who asks a node for its own address gets one that no other node can use."""
    found = [cluster.run("getent", "ahostsv4", "node1", node=node).stdout.split()[0] for node in ("node1", "node2")]

    assert found == ["127.0.1.1", "10.77.0.11"]


@pytest.mark.parametrize("node", [pytest.param("head", marks=pytest.mark.long), "node1"])
def test_jobs_can_use_this_python_and_the_code_under_test(cluster: Cluster, node: str) -> None:
    code = "import ddp_hpc, torch; print(torch.ones(2).sum().item())"

    assert cluster.run(sys.executable, "-c", code, node=node).stdout == "2.0\n"


def test_a_job_gets_the_gpus_that_it_asked_for(cluster: Cluster, shared_dir: Path) -> None:
    job = submit(cluster, shared_dir, "echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE", "--gpus-per-node=2")

    assert output(cluster, shared_dir, job) == "0,1 2\n"


def test_nodes_share_the_shared_directory_and_nothing_of_tmp(cluster: Cluster, shared_dir: Path) -> None:
    private = Path("/tmp/left-by-node1")
    for path in (private, shared_dir / "left-by-node1"):
        cluster.run("touch", path, node="node1")

    seen = cluster.run("ls", private, shared_dir, node="node2", check=False)

    assert (shared_dir / "left-by-node1").owner() == USER
    assert "left-by-node1" in seen.stdout
    assert "No such file" in seen.stderr


def test_both_networks_carry_and_count(cluster: Cluster) -> None:
    before = cluster.interface_bytes("node1", "ib0")

    cluster.run(
        "bash", "-c", "dd if=/dev/zero bs=50000 count=1 status=none > /dev/udp/node1-ib/9", node="node2"
    )  # nobody has to take it

    received, _ = cluster.interface_bytes("node1", "ib0")
    assert received - before[0] > 10_000


def test_the_database_tells_what_became_of_a_job(cluster: Cluster, shared_dir: Path) -> None:
    job = submit(cluster, shared_dir, "exit 3")

    def told() -> str:
        words = ["--noheader", "--parsable2", "--allocations", f"--jobs={job}", "--format=State,ExitCode"]
        said = cluster.run("sacct", *words).stdout.strip()
        return said if "FAILED" in said else ""

    assert cluster.wait_for(told, 60) == "FAILED|3:0"


@pytest.mark.long
def test_a_node_without_power_is_gone_and_comes_back(cluster: Cluster, shared_dir: Path) -> None:
    process = cluster.popen("sleep", "100", node="node3")
    if cgroups.usable():
        step = "/sys/fs/cgroup/freezer/step"
        freeze = f"mkdir {step}; echo $$ > {step}/cgroup.procs; echo FROZEN > {step}/freezer.state; sleep 100"
        cluster.popen("bash", "-c", freeze, node="node3", user="root")
        cluster.wait_for(
            lambda: "FROZEN" in cluster.run("cat", f"{step}/freezer.state", node="node3", check=False).stdout, 60
        )

    cluster.kill("node3")

    assert process.wait(60) != 0
    assert cluster.lab.init_pid("node3") is None
    reach = ["bash", "-c", "exec 3<>/dev/tcp/node3/6818"]
    assert cluster.run(*reach, check=False).returncode != 0
    cluster.boot("node3")
    cluster.wait_for(lambda: cluster.run(*reach, check=False).returncode == 0, 60)


@pytest.mark.long
def test_the_next_test_finds_everything_mended(cluster: Cluster, shared_dir: Path) -> None:
    submit(cluster, shared_dir, "sleep 1000", "--nodes=4")
    cluster.kill("node4")
    cluster.cut("node2")
    cluster.reconfig(KillWait="3")
    cluster.stop_dbd()
    cluster.stop_controller()

    cluster.mend()

    assert cluster.run("squeue", "--noheader").stdout == ""
    assert cluster.run("sinfo", "--noheader", "--partition=batch", "--format=%D %T").stdout == "4 idle\n"
    assert "KillWait                = 2 sec" in cluster.run("scontrol", "show", "config").stdout
    assert cluster.run("sacctmgr", "--noheader", "show", "cluster").stdout.startswith("       lab")
