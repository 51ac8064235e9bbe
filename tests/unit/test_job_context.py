"""The world that a job was given, apart from the one that the run asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job.job_context import JobContext, given_world, why_job_misfits
from ddp_hpc.job.launcher import agents_step_argv
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, TrainSpec
from ddp_hpc.run.workload.table import workload_of
from ddp_hpc.run.world import World
from tests.made_launch import launch_of

SPEC = RunSpec(name="net", resources=ResourcesSpec(nodes=2, workers_per_node=3), train=TrainSpec(global_batch_size=24))


def allocation(*nodes: str, tasks: int) -> Allocation:
    return Allocation(job_id="7", node_names=nodes, tasks_per_node=(tasks,) * len(nodes))


def test_a_job_gives_its_nodes_and_each_has_the_workers_that_were_asked_for() -> None:
    job = allocation("node1", "node2", tasks=8)  # room for more

    assert given_world(SPEC, job) == SPEC.resources.world == World(num_nodes=2, workers_per_node=3)
    assert why_job_misfits(SPEC, job) is None


def test_a_job_of_other_nodes_is_a_world_of_its_own_and_does_not_fit() -> None:
    job = allocation("node1", "node2", "node3", tasks=3)

    assert given_world(SPEC, job).world_size == 9
    assert "`resources.nodes` is 2, but job 7 has 3" in (why_job_misfits(SPEC, job) or "")


def test_without_a_job_the_world_is_this_machine() -> None:
    assert given_world(SPEC, None) == World(num_nodes=1, workers_per_node=3)


@pytest.mark.parametrize(
    ("rank", "node"), [(0, "node1"), (2, "node1"), (3, "node2"), (8, "node3"), (9, None), (-1, None)]
)
def test_ranks_fill_one_node_of_the_given_world_after_the_other(rank: int, node: str | None) -> None:
    assert context(allocation("node1", "node2", "node3", tasks=3)).node_of(rank) == node


def test_what_is_started_follows_the_given_world_and_not_the_spec() -> None:
    given = World(num_nodes=5, workers_per_node=2)

    argv = agents_step_argv(replace(launch_of(SPEC, RunDir(Path("/runs/net"))), world=given))

    assert {"--nodes=5", "--ntasks=5", "--cpus-per-task=2"} <= set(argv)
    assert argv[argv.index("--num-workers") + 1] == "2"


@pytest.mark.parametrize(("asked", "world_size", "micro"), [(None, 6, 4), (None, 4, 6), (2, 4, 2)])
def test_a_workers_share_of_the_batch_follows_the_world_that_trains(asked: Any, world_size: int, micro: int) -> None:
    train = TrainSpec(global_batch_size=24, micro_batch_size=asked)

    assert train.micro_batch_size_in(world_size) == micro


def context(job: Allocation) -> JobContext:
    return JobContext(
        run=RunDir(Path("/runs/net")),
        spec=SPEC,
        workload=workload_of(SPEC),
        world=given_world(SPEC, job),
        allocation=job,
        is_for_slurm=True,
        environ={},
    )
