"""Ranks and addresses are right wherever a process finds itself: array tasks, salloc, srun --pty, uneven nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.runs import SMALL, LoginNode, world

ENV = f"{sys.executable} -m ddp_hpc env"
NODE1 = {"10.77.0.11", "10.78.0.11"}
"""Where node1 is reached; to itself, its name is 127.0.1.1."""


def told(*outputs: Path) -> list[dict[str, Any]]:
    """Return the values of each `env --json`, by name, in the order of ranks."""
    found = [json.loads(path.read_text()) for path in outputs]
    return sorted(
        ({one["name"]: one["value"] for one in each["variables"]} for each in found), key=lambda one: int(one["RANK"])
    )


def ranks(found: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    return [tuple(int(one[name]) for name in names) for one in found]


def test_tasks_of_an_array_each_have_a_world_of_their_own(cluster: Cluster, login: LoginNode) -> None:
    script = f"#!/bin/bash\nsrun --output=$SLURM_ARRAY_TASK_ID-%t.json {ENV} --json\n"
    (login.folder / "array.sh").write_text(script)
    cluster.run("sbatch", "--array=0-2", "--nodes=2", "--ntasks-per-node=1", "--mem=500", "array.sh", cwd=login.folder)

    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 120)

    worlds = [told(*(login.folder / f"{number}-{rank}.json" for rank in range(2))) for number in range(3)]
    assert [ranks(world) for world in worlds] == [[(0, 0, 0, 1, 2), (1, 0, 1, 1, 2)]] * 3
    assert all(len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in world}) == 1 for world in worlds)
    assert len({world[0]["MASTER_PORT"] for world in worlds}) == 3


def test_uneven_nodes_under_salloc_have_consecutive_ranks(cluster: Cluster, login: LoginNode) -> None:
    shape = ["--nodes=2", "--ntasks=3", "--distribution=block", "--nodelist=node1,node2", "--mem=500"]

    cluster.run("salloc", *shape, "srun", "--output=%t.json", *ENV.split(), "--json", cwd=login.folder)

    found = told(*(login.folder / f"{rank}.json" for rank in range(3)))
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert {one["WORLD_SIZE"] for one in found} == {"3"}
    assert sorted(int(one["LOCAL_WORLD_SIZE"]) for one in found) in ([1, 2, 2], [1, 1, 2], [2, 2, 1])
    assert {one["MASTER_ADDR"] for one in found} <= NODE1
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in found}) == 1


def test_an_interactive_task_is_a_world_of_one(cluster: Cluster, login: LoginNode) -> None:
    command = ["srun", "--pty", "--nodelist=node1", "--mem=500", *ENV.split(), "--json"]

    done = cluster.run("script", "--quiet", "--command", " ".join(command), "/dev/null", cwd=login.folder)

    said = done.stdout[done.stdout.index("{") :]  # the terminal may echo the end of its input first
    found = {one["name"]: one["value"] for one in json.loads(said)["variables"]}
    assert ranks([found]) == [(0, 0, 0, 1, 1)]
    assert found["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.long
def test_a_script_of_ones_own_trains_by_the_exported_values(cluster: Cluster, login: LoginNode) -> None:
    """Plain PyTorch, started with srun: `init_process_group` finds everything in the environment."""
    (login.folder / "own.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "mine = torch.tensor([float(dist.get_rank())])\n"
        "dist.all_reduce(mine)\n"
        "print(int(mine.item()), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    task = f'eval "$({ENV} --export)"; exec {sys.executable} own.py'
    shape = ["--nodes=2", "--ntasks-per-node=2", "--mem=2G"]

    done = cluster.run("srun", *shape, "bash", "-c", task, cwd=login.folder, timeout=240)

    assert done.stdout.split() == ["6"] * 4


@pytest.mark.long
def test_a_job_script_runs_under_salloc_too(cluster: Cluster, login: LoginNode) -> None:
    login.submit("queued", *SMALL, *world(2, 1), "--wait")
    assert login.type("render", "digits.yaml", "name=inside", *SMALL, *world(2, 1)).returncode == 0
    script = login.run("inside").job_script

    cluster.run("salloc", "--nodes=2", "--ntasks-per-node=1", "--mem=2G", "bash", script, cwd=login.folder, timeout=300)

    assert login.digest("inside") == login.digest("queued")


def test_env_explains_what_it_chose_and_refused(cluster: Cluster, login: LoginNode) -> None:
    (login.folder / "batch.sh").write_text(f"#!/bin/bash\n{ENV} > env.txt\n")
    cluster.run("sbatch", "--nodes=2", "--nodelist=node1,node2", "--mem=500", "batch.sh", cwd=login.folder)
    output = login.folder / "env.txt"

    text = cluster.wait_for(lambda: output.exists() and output.read_text(), 90)

    assert "10.78.0.11" in str(text)
    assert "ib0" in str(text)
    assert "eth0" in str(text)
    assert "loopback" in str(text)


@pytest.mark.long
def test_values_of_the_users_own_win(cluster: Cluster, login: LoginNode) -> None:
    own = {"MASTER_ADDR": "10.77.0.11", "MASTER_PORT": "23456"}

    said = login.type(
        "submit", "digits.yaml", "name=own", "--cluster", "slurm", *SMALL, *world(2, 1), "slurm.nodelist=node1,node2",
        "--wait", env=own,
    )  # fmt: skip

    assert said.returncode == 0, said.stderr
    meeting = next(line for line in login.console("own").splitlines() if line.startswith("ranks meet"))
    assert all(f" {value}" in meeting for value in own.values())
