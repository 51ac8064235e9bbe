"""What Slurm's variables say; the environments are those of the lab's jobs (22.05)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.allocation import (
    Allocation,
    StepTask,
    expand_counts,
    outer_job_variables,
    read_allocation,
    shape_problem,
    step_task,
)
from ddp_hpc.run.world import World
from tests.unit.made_network import batch, shell, task


def allocation(environ: dict[str, str]) -> Allocation:
    found = read_allocation(environ)
    assert found is not None
    return found


def test_outside_of_jobs_there_is_none() -> None:
    assert read_allocation({"SLURM_CONF": "/etc/slurm/slurm.conf"}) is None


def test_a_batch_script_is_no_task_though_it_has_a_rank() -> None:
    found = allocation(batch(SLURM_CPUS_PER_TASK="2", SLURM_JOB_END_TIME="1763700000"))

    assert (found.step is not None, found.process_kind, found.is_on_first_node) == (False, "shell on a node", True)
    assert found.node_names == ("node1", "node2", "node3")
    assert found.tasks_per_node == (4, 1, 1)
    assert (found.cpus_per_task, found.end_time) == (2, 1763700000)
    assert (found.array_job_id, found.array_task_id, found.restart_count) == (None, None, 0)


def test_the_shell_of_salloc_is_on_no_node() -> None:
    found = allocation(shell())

    assert (found.step is not None, found.process_kind, found.is_on_first_node) == (False, "shell outside", False)


@pytest.mark.parametrize(
    "step_id",
    ["4294967290", "4294967291", "-6", "-5", "TBD"],
    ids=["interactive", "batch", "interactive of 26.05", "batch of 26.05", "a text of a Slurm to come"],
)
def test_a_shell_that_slurm_counts_as_a_step_is_a_shell(step_id: str) -> None:
    found = allocation(batch(SLURM_STEP_ID=step_id, SLURM_STEP_NODELIST="node1", SLURM_STEP_TASKS_PER_NODE="1"))

    assert found.process_kind == "shell on a node"


def test_a_task_knows_its_place() -> None:
    place = step_task(task(4, 1, 0, on="node2"))

    assert (place.rank, place.local_rank, place.node_rank) == (4, 0, 1)
    assert (place.world_size, place.local_world_size, place.num_nodes) == (6, 1, 3)
    assert (place.block_rank, place.rank_zero_node) == (4, "node1")


def test_a_terminal_under_srun_is_a_task() -> None:
    found = allocation(task(1, 0, 1, on="node1", SLURM_PTY_PORT="42175"))

    assert found.process_kind == "task"


def test_a_step_may_be_smaller_than_its_job() -> None:
    place = step_task(task(1, 1, 0, on="node3", nodes="node[2-3]", tasks="1(x2)"))

    assert (place.world_size, place.num_nodes, place.rank_zero_node) == (2, 2, "node2")


def test_slurm_says_the_rank_however_tasks_are_distributed() -> None:
    place = step_task(task(3, 0, 1, on="node1", SLURM_DISTRIBUTION="cyclic"))

    assert (place.rank, place.block_rank, place.rank_zero_node) == (3, 1, "node1")


def test_a_hostfile_hides_where_rank_zero_is() -> None:
    elsewhere = step_task(task(1, 0, 0, on="node1", nodes="node[1,3]", tasks="1,2", SLURM_DISTRIBUTION="arbitrary"))
    itself = step_task(task(0, 1, 0, on="node3", nodes="node[1,3]", tasks="1,2", SLURM_DISTRIBUTION="arbitrary"))

    assert (elsewhere.rank_zero_node, itself.rank_zero_node) == (None, "node3")


@pytest.mark.parametrize(
    "other_job",
    [
        batch("node[4-6]", on="node4"),
        batch("node2", "1", on="node2"),
        batch("node1", "2", on="node1"),
    ],
    ids=["other nodes", "another first node", "another shape"],
)
def test_a_job_submitted_from_inside_a_step_has_inherited_its_variables(other_job: dict[str, str]) -> None:
    """Measured: `sbatch` in a step passes SLURM_STEP_* on to the new job's script."""
    found = allocation({**task(0, 0, 0, on="node1"), **other_job})

    assert found.process_kind == "shell on a node"


def test_the_tasks_of_an_array_have_job_ids_of_their_own() -> None:
    found = allocation(
        batch(SLURM_JOB_ID="9", SLURM_ARRAY_JOB_ID="8", SLURM_ARRAY_TASK_ID="3", SLURM_RESTART_COUNT="2")
    )

    assert (found.job_id, found.array_job_id, found.array_task_id, found.restart_count) == ("9", "8", 3, 2)


def test_only_a_task_has_a_place() -> None:
    with pytest.raises(ConfigError, match=r"has no rank\. The job script starts it with `srun`"):
        step_task(batch())


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_NODELIST is not set"),
        ({**shell(), "SLURM_TASKS_PER_NODE": "4(x"}, r"'4\(x' is not of the form"),
        ({**shell(), "SLURM_RESTART_COUNT": "-1"}, "SLURM_RESTART_COUNT is '-1', but it must be a number"),
        ({**shell(), "SLURM_JOB_NODELIST": ","}, "must name the nodes"),
        ({**task(0, 0, 0, on="node1"), "SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
    ],
)
def test_broken_variables_are_named(broken: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_allocation(broken)


@pytest.mark.parametrize("name", ["SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "SLURM_JOB_END_TIME"])
def test_a_variable_that_a_run_can_do_without_ends_no_job_whatever_slurm_writes_into_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"{name.lower()}=4(x2)"
    plain, odd = (allocation({**batch(), name: value}) for value in ("", text))

    assert odd == plain
    assert caplog.messages == [
        f"{name} is {text!r}, and not a number, so it counts as not set. The run goes on without it."
    ]


@pytest.mark.parametrize(
    ("text", "counts"),
    [("1", [1]), ("4(x2),1", [4, 4, 1]), ("2,1,2", [2, 1, 2]), ("72(x1000)", [72] * 1000)],
)
def test_counts_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_the_ranks_of_all_tasks_are_all_ranks(tasks: list[int]) -> None:
    job = {"step_id": 0, "rank": 0, "node_names": ("node",) * len(tasks), "tasks_per_node": tuple(tasks)}
    places = [(node, local) for node, count in enumerate(tasks) for local in range(count)]
    ranks = [StepTask(**job, node_rank=node, local_rank=local).block_rank for node, local in places]  # type: ignore[arg-type]

    assert ranks == list(range(sum(tasks)))


@pytest.mark.parametrize(
    ("num_nodes", "tasks_per_node", "told"),
    [(3, 1, None), (2, 1, "`resources.nodes` is 2, but job 7 has 3"), (3, 4, "job 7 has a node with room for only 1")],
)
def test_a_run_of_another_shape_does_not_fit(num_nodes: int, tasks_per_node: int, told: str | None) -> None:
    problem = shape_problem(allocation(batch()), World(num_nodes=num_nodes, workers_per_node=tasks_per_node))

    assert problem is None if told is None else told in (problem or "")


@pytest.mark.parametrize(
    ("more", "scontrol_id"),
    [
        ({}, "9"),
        ({"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "3"}, "8_3"),
        ({"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "0"}, "8_0"),
        ({"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "7"}, "9_7"),
        ({"SLURM_ARRAY_JOB_ID": "9"}, "9"),
    ],
    ids=["a job", "a task", "task 0", "the task that has the array's number", "half an array"],
)
def test_scontrol_is_told_of_a_task_and_never_of_its_whole_array(more: dict[str, str], scontrol_id: str) -> None:
    assert allocation(batch(SLURM_JOB_ID="9", **more)).scontrol_id == scontrol_id


def test_the_gpus_of_an_outer_job_are_not_asked_for_again() -> None:
    inherited = {"SLURM_GPUS": "8", "SLURM_GPUS_PER_NODE": "4", "SLURM_GPUS_PER_TASK": "1", "SLURM_GRES": "gpu:1"}
    environ = {**inherited, "SLURM_GPUS_ON_NODE": "2", "SLURM_JOB_GPUS": "0,1", "SLURM_CPU_BIND": "none"}

    assert set(outer_job_variables(environ, set())) == set(inherited)
    assert set(outer_job_variables(environ, {"gpus-per-node", "gres"})) == {"SLURM_GPUS", "SLURM_GPUS_PER_TASK"}
