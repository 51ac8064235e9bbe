"""Processes that another program's launcher has started: each finds its place by the variables that the launcher documents."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.rendezvous import launchers
from ddp_hpc.cluster.rendezvous.launchers import (
    LAUNCHERS,
    RankPlace,
    find_place,
    numeric_address,
    with_port_of_run,
    with_workers,
    worker_env_of,
)
from ddp_hpc.cluster.slurm.allocation import read_allocation
from tests.unit.made_network import LO, batch, host, interface, task

HOST = host(
    [interface("eth0", "10.77.0.12/24"), LO],
    names={"node1": ["10.77.0.11"], "me": ["127.0.1.1"]},
    routes={"10.77.0.11": "10.77.0.12", "10.77.0.13": "10.77.0.12", "127.0.0.1": "127.0.0.1"},
)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.77.0.11",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_ADDR": "node1",
}
PALS = {"PALS_RANKID": "3", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PMI_RANK": "3", "PMI_SIZE": "4"}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "node1"}
FLUX = {
    "FLUX_TASK_RANK": "3",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_SIZE": "4",
    "FLUX_JOB_NNODES": "2",
    "FLUX_JOB_ID": "51874562048",
    "MASTER_ADDR": "node1",
}
BY_HAND = {name: TORCHRUN[name] for name in TORCHRUN if not name.startswith("TORCHELASTIC")}
WORKERS = {
    "torchrun": TORCHRUN,
    "mpirun (Open MPI)": OPEN_MPI,
    "mpiexec (PALS)": {**PALS, "PBS_JOBID": "4711.server", "MASTER_ADDR": "node1"},
    "mpiexec (MPICH, Intel MPI)": MPICH,
    "flux run": FLUX,
    "PyTorch's variables, set by hand": BY_HAND,
}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "2",
    "PET_MASTER_ADDR": "node1",
    "PET_MASTER_PORT": "29400",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.77.0.11\n10.77.0.12",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "2",
    "SKYPILOT_TASK_ID": "sky-2026-11-23-10-00-00-000000_train_1",
}
NODES = {"Kubeflow, or torchrun's own variables": KUBEFLOW, "SkyPilot": SKYPILOT}


def placed(environ: Mapping[str, str], *, first_node: str | None = None) -> RankPlace:
    place = find_place(environ, read_allocation(environ), HOST, first_node=first_node)
    assert place is not None
    return place


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_finds_its_rank_its_node_and_rank_zero(name: str) -> None:
    place = placed(WORKERS[name])

    assert (place.launcher, place.scope) == (name, "worker")
    numbers = (place.rank, place.local_rank, place.world_size, place.local_world_size, place.node_rank, place.num_nodes)
    assert numbers == (3, 1, 4, 2, 1, 2)
    assert numeric_address(place, HOST) == "10.77.0.11"


@pytest.mark.parametrize("name", NODES)
def test_a_process_of_a_node_finds_its_number_and_the_first_node(name: str) -> None:
    place = placed(NODES[name])

    assert (place.launcher, place.scope) == (name, "node")
    assert (place.node_rank, place.num_nodes, place.local_world_size, place.rank) == (1, 2, 2, 2)
    assert numeric_address(place, HOST) == "10.77.0.11"


def test_every_row_has_a_documented_environment_here() -> None:
    assert {row.name for row in LAUNCHERS} == {*WORKERS, *NODES, "srun"}


def test_a_task_of_srun_finds_its_place_by_slurms_variables_and_the_name_service() -> None:
    place = placed(task(2, 1, 0, on="node2", nodes="node[1-2]", tasks="2(x2)"))

    assert (place.launcher, place.rank, place.local_world_size, place.node_rank) == ("srun", 2, 2, 1)
    assert place.address.value == "10.77.0.11"


@pytest.mark.parametrize("environ", [{}, {"PBS_JOBID": "1.server"}, batch(), {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_process_that_no_launcher_has_started_has_no_place(environ: dict[str, str]) -> None:
    assert find_place(environ, read_allocation(environ), HOST) is None


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        (SKYPILOT, TORCHRUN, "torchrun"),
        (KUBEFLOW, TORCHRUN, "torchrun"),
        (task(2, 1, 0, on="node2", nodes="node[1-2]", tasks="2(x2)"), TORCHRUN, "torchrun"),
        (task(2, 1, 0, on="node2", nodes="node[1-2]", tasks="2(x2)"), OPEN_MPI, "mpirun (Open MPI)"),
        (task(2, 1, 0, on="node2", nodes="node[1-2]", tasks="2(x2)"), SKYPILOT, "srun"),
        (SKYPILOT, {"PMI_RANK": "1", "PMI_SIZE": "2"}, "SkyPilot"),
    ],
)
def test_what_has_started_the_process_itself_counts(
    outer: dict[str, str], inner: dict[str, str], expected: str
) -> None:
    assert placed({**outer, **inner}).launcher == expected


def test_the_first_node_of_pbs_has_rank_zero_where_nobody_names_another() -> None:
    place = placed({**PALS, "PBS_JOBID": "4711.server"}, first_node="node1")

    assert (place.address.value, place.address.source) == ("node1", "PBS_NODEFILE")


def test_all_processes_of_a_job_compute_the_same_port_and_other_jobs_another() -> None:
    ports = [
        placed({**PALS, "PALS_RANKID": rank, "PBS_JOBID": job, "MASTER_ADDR": "node1"}).port.value
        for job, rank in (("4711.server", "1"), ("4711.server", "3"), ("4712.server", "3"))
    ]

    assert ports[0] == ports[1] != ports[2]


@pytest.mark.parametrize("environ", [MPICH, {**OPEN_MPI, "PBS_JOBID": "4711.server"}, SKYPILOT])
def test_runs_of_one_job_or_of_none_meet_at_different_ports(environ: dict[str, str]) -> None:
    ports = [with_port_of_run(placed(environ), Path(run)).port.value for run in ("/runs/a", "/runs/a", "/runs/b")]

    assert ports[0] == ports[1] != ports[2]
    assert all(10_000 <= int(port or 0) < 32_768 for port in ports)


def test_a_port_that_the_user_or_the_launcher_names_counts_for_every_run() -> None:
    place = placed({**MPICH, "MASTER_PORT": "29500"})

    assert with_port_of_run(place, Path("/runs/a")) == place


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**TORCHRUN, "RANK": "x"}, ["RANK is 'x'", "number"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}, ["rank 2", "--map-by"]),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "5"}, ["same number"]),
        ({**FLUX, "FLUX_JOB_SIZE": "5"}, ["same number"]),
        ({**PALS}, ["MASTER_ADDR"]),
        ({**PALS, "PALS_LOCAL_SIZE": ""}, ["PALS_LOCAL_SIZE is not set"]),
        ({**KUBEFLOW, "PET_NNODES": "1:4"}, ["PET_NNODES", "fixed"]),
        ({**KUBEFLOW, "PET_NODE_RANK": "2"}, ["PET_NODE_RANK is 2", "0 and 1"]),
        ({**KUBEFLOW, "PET_MASTER_PORT": "70000"}, ["PET_MASTER_PORT", "65535"]),
        ({**SKYPILOT, "SKYPILOT_NODE_RANK": "-1"}, ["SKYPILOT_NODE_RANK is '-1'"]),
        (task(1, 1, 0, on="node2", nodes="node[1-2]", tasks="2(x2)"), ["--distribution=block"]),
        (task(4, 1, 0, on="node2", nodes="node[1-2]", tasks="4,1"), ["same number"]),
    ],
)
def test_variables_that_do_not_fit_each_other_are_refused(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        placed(environ)

    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize("text", ["auto", "gpu", "", "0"])
def test_a_node_asks_the_configuration_for_its_workers_where_the_launcher_names_no_number(text: str) -> None:
    place = with_workers(placed({**KUBEFLOW, "PET_NPROC_PER_NODE": text}), 3)

    assert (place.local_world_size, place.rank, place.world_size) == (3, 3, 6)


def test_every_variable_names_the_launchers_variable_that_it_comes_from() -> None:
    found = worker_env_of(placed(MPICH), MPICH, HOST)

    ranks = {name: found.value(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")}
    assert ranks == {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    assert found.variables["RANK"].source == "PMI_RANK"
    assert found.value("MASTER_ADDR") == "10.77.0.11"
    assert found.value("GLOO_SOCKET_IFNAME") == "eth0"
    assert "recognised by PMI_RANK, PMI_SIZE" in found.process


def test_the_first_node_takes_its_own_name_even_where_that_means_loopback() -> None:
    first = {**SKYPILOT, "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "me\nnode1"}

    assert numeric_address(placed(first), HOST) == "127.0.1.1"
    assert worker_env_of(placed(first), first, HOST).value("GLOO_SOCKET_IFNAME") == "eth0"


def test_a_node_that_cannot_resolve_the_first_one_says_so() -> None:
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        numeric_address(placed({**KUBEFLOW, "PET_MASTER_ADDR": "nowhere"}), HOST)


def test_the_table_reads_no_file_and_no_environment_of_this_process() -> None:
    tree = ast.parse(Path(launchers.__file__).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}

    assert imported.isdisjoint({"os", "socket", "subprocess"})
