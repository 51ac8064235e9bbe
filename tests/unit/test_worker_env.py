"""Every variable that a worker gets from ddp_hpc: from facts to a table, and from the table to what each launcher's workers find."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ddp_hpc.base.private_cache import private_cache_dir
from ddp_hpc.cluster.rendezvous.worker_env import (
    CPUS_BEFORE,
    GIVEN_VARIABLE,
    PROBE_FOLDER,
    PROBES_ITSELF,
    RANKS,
    TABLE_VARIABLE,
    USERS_CODE,
    Sourced,
    WorkerEnv,
    endpoint_of_run,
    keep_users_values,
    launched_worker_env,
    library_variables,
    node_variables,
    probe_variables,
    ranks_by_shape,
    read_worker_env,
    threads,
    users_environ,
    with_undo_record,
)
from ddp_hpc.cluster.slurm.allocation import step_task
from ddp_hpc.job.node.python_environ import IMPORT_PATH_NAME
from ddp_hpc.job.workers import AgentWorkers
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_rendezvous_token
from tests.made_run import make_run
from tests.unit.held_signals import signals_held_back
from tests.unit.made_network import batch, task
from tests.unit.test_agent import await_news

NO_ROUTE = Sourced(rule="this node has no route to 10.0.0.1")
IB0 = Sourced(value="ib0", source="routing table", rule="the interface of this node on the route to 10.0.0.1")
ALL_NAMES = {
    *RANKS, "MASTER_ADDR", "MASTER_PORT", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS",
    "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "RES_OPTIONS", "PYTHONPATH",
}  # fmt: skip

FACTS = {
    **ranks_by_shape(node_rank=1, num_nodes=3, num_workers=2, local_rank=1),
    **endpoint_of_run("10.0.0.1", 29500),
    **node_variables(IB0, threads(8, 2, source="Slurm")),
}


def made(*, interface: Sourced = IB0, environ: Mapping[str, str] | None = None) -> WorkerEnv:
    """Return the table of the second worker on the second of three nodes with two each."""
    facts = {**FACTS, **node_variables(interface, threads(8, 2, source="Slurm"))}
    return launched_worker_env("an agent", facts, {"PYTHONPATH": "/run/snapshot", **(environ or {})}, ["/run/snapshot"])


ROWS = [
    ("RANK", "3", "ddp-hpc", "ranks count the workers node by node"),
    ("LOCAL_RANK", "1", "ddp-hpc", "the worker's number on its node"),
    ("WORLD_SIZE", "6", "ddp-hpc", "nodes: 3, workers on each: 2"),
    ("LOCAL_WORLD_SIZE", "2", "ddp-hpc", "every node has this many workers"),
    ("NODE_RANK", "1", "ddp-hpc", "the node's number"),
    ("MASTER_ADDR", "10.0.0.1", "supervisor", "the line `ranks meet at` in the job's log"),
    ("MASTER_PORT", "29500", "supervisor", "the line `ranks meet at` in the job's log"),
    ("NCCL_SOCKET_IFNAME", "=ib0", "routing table", "the interface of this node on the route"),
    ("GLOO_SOCKET_IFNAME", "ib0", "routing table", "the interface of this node on the route"),
    ("OMP_NUM_THREADS", "4", "Slurm", "CPUs here: 8, workers: 2"),
    ("CUBLAS_WORKSPACE_CONFIG", ":4096:8", "ddp-hpc", "train.deterministic"),
    ("PYTORCH_NVML_BASED_CUDA_CHECK", "1", "ddp-hpc", "must not be initialised before"),
    ("TORCHINDUCTOR_CACHE_DIR", f"{private_cache_dir()}/inductor", "ddp-hpc", "a directory that only you can enter"),
    ("RES_OPTIONS", "timeout:1 attempts:3", "ddp-hpc", "reverse DNS"),
    ("PYTHONPATH", "/run/snapshot", "ddp-hpc", "the user's code"),
]


def test_the_table_has_every_variable_of_a_worker() -> None:
    assert {name for name, *_ in ROWS} == ALL_NAMES == made().variables.keys()


@pytest.mark.parametrize(("name", "value", "source", "why"), ROWS, ids=[row[0] for row in ROWS])
def test_each_variable_has_its_value_its_source_and_why(name: str, value: str, source: str, why: str) -> None:
    fact = made().variables[name]

    assert (fact.value, fact.source) == (value, source)
    assert why in fact.rule


@pytest.mark.parametrize(
    "line", ["NCCL_SOCKET_IFNAME==ens1f0", " NCCL_SOCKET_IFNAME = ens1f0", "# NCCL_SOCKET_IFNAME=ens1f0"]
)
def test_an_interface_of_nccls_own_file_is_left_to_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".nccl.conf").write_text(f"NCCL_DEBUG=WARN\n{line}\n")

    found = made()

    is_comment = line.startswith("#")
    assert found.value("NCCL_SOCKET_IFNAME") == ("=ib0" if is_comment else None)
    assert (found.variables["NCCL_SOCKET_IFNAME"].source == "~/.nccl.conf") is not is_comment
    assert found.value("GLOO_SOCKET_IFNAME") == "ib0"


@pytest.mark.parametrize(
    ("name", "users", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "^lo", "^lo"),
        ("OMP_NUM_THREADS", "7", "7"),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", ":16:8"),
        ("GLOO_SOCKET_IFNAME", "", ""),  # nothing, so that gloo chooses by itself
        ("RANK", "0", "3"),
        ("WORLD_SIZE", "", "6"),
        ("MASTER_ADDR", "node1", "10.0.0.1"),
    ],
)
def test_what_is_set_wins_even_if_to_nothing_but_for_ranks_and_endpoint(name: str, users: str, value: str) -> None:
    found = made(environ={name: users})

    assert found.value(name) == value
    assert {name: users, **found.environ}[name] == value
    assert (name in found.given) == (value != users)


def test_what_is_not_known_is_not_set() -> None:
    found = made(interface=NO_ROUTE)

    assert found.variables["NCCL_SOCKET_IFNAME"] == NO_ROUTE
    assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & found.environ.keys()


AGENTS = task(
    1, 1, 0, on="node2", tasks="1(x3)", SLURM_NTASKS="3", SLURM_CPUS_PER_TASK="8", SLURM_TRES_PER_TASK="cpu:8", SLURM_GTIDS="1"
)  # fmt: skip
"""What the second of three agents has of Slurm."""


def slurms_of(found: WorkerEnv) -> dict[str, str | None]:
    return {name: fact.value for name, fact in found.variables.items() if name.startswith("SLURM_")}


def test_an_agents_worker_gets_slurms_variables_as_a_task_of_its_own() -> None:
    """Scripts written for `srun --ntasks-per-node=2` read their rank there."""
    found = made(environ=AGENTS)

    assert slurms_of(found) == {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "6", "SLURM_NPROCS": "6",
        "SLURM_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_GTIDS": "2,3", "SLURM_CPUS_PER_TASK": "4", "SLURM_TRES_PER_TASK": "cpu:4",
    }  # fmt: skip
    step = step_task({**AGENTS, **found.environ})
    assert (step.rank, step.local_rank, step.world_size, step.local_world_size, step.node_rank) == (3, 1, 6, 2, 1)
    assert step.block_rank == step.rank


def test_a_task_of_a_step_keeps_what_srun_has_set_for_it() -> None:
    """Also where tasks were dealt out in another way than ours."""
    srun = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "6", "SLURM_TASKS_PER_NODE": "3,2,1"}

    assert not slurms_of(made(environ={**AGENTS, **srun}))


def test_without_slurm_no_variable_of_slurm_is_made() -> None:
    assert not slurms_of(made(environ={"SLURM_CONF": "/etc/slurm.conf"}))


def test_workers_on_one_machine_within_a_job_have_ranks_of_their_own_and_what_the_batch_script_lacks_stays_unset() -> (
    None
):
    found = slurms_of(made(environ=batch(on="node2")))

    assert (found["SLURM_PROCID"], found["SLURM_NTASKS"]) == ("3", "6")
    assert "SLURM_STEP_NUM_TASKS" not in found


@pytest.mark.parametrize(
    ("num_cpus", "num_workers", "asked", "value", "why"),
    [
        (8, 2, None, "4", "CPUs here: 8, workers: 2"),
        (8, 2, 3, "3", "`resources.cpus_per_worker` is 3"),
        (8, 2, 5, "1", "`resources.cpus_per_worker` is 5"),
        (1, 2, None, "1", "CPUs here: 1, workers: 2"),
        (4, 1, 16, "4", "`resources.cpus_per_worker` is 16"),
        (6, 1, None, "6", "CPUs here: 6, workers: 1"),
    ],
)
def test_workers_compute_with_no_more_threads_than_they_have_cpus(
    num_cpus: int, num_workers: int, asked: int | None, value: str, why: str
) -> None:
    found = threads(num_cpus, num_workers, asked, source="Slurm")

    assert found.value == value
    assert why in found.rule


def test_a_worker_can_be_asked_for_the_table_it_was_started_with() -> None:
    table = made(environ={"OMP_NUM_THREADS": "7"})

    assert read_worker_env({"OMP_NUM_THREADS": "7", **table.environ}) == table
    assert read_worker_env({"RANK": "3"}) is None


def test_a_variable_that_the_worker_has_changed_is_shown_as_it_is_now() -> None:
    table = made()

    found = read_worker_env({**table.environ, "OMP_NUM_THREADS": "16"})

    assert found is not None
    assert found.value("OMP_NUM_THREADS") == "16"
    assert found.variables["OMP_NUM_THREADS"].source == "environment"
    assert "the launcher set it to '4'" in found.variables["OMP_NUM_THREADS"].rule


def test_a_machine_alone_has_no_supervisors_endpoint() -> None:
    found = endpoint_of_run("127.0.0.1", 40000, is_alone=True)

    assert [(fact.value, fact.source) for fact in found.values()] == [("127.0.0.1", "agent"), ("40000", "agent")]


def test_libraries_read_the_same_before_the_ranks_have_met() -> None:
    computing = threads(8, 2, source="Slurm")

    assert library_variables(computing).items() <= keep_users_values(node_variables(IB0, computing), {}).items()


def test_a_run_that_a_rank_submits_gets_nothing_that_the_rank_was_given() -> None:
    users = {"PYTHONPATH": "/home/u/lib", "NCCL_SOCKET_IFNAME": "mine", "SLURM_PROCID": "1", "PATH": "/bin"}
    environ = {**users, **with_undo_record({"NCCL_DEBUG": "INFO"}, users)}
    environ |= with_undo_record({"PYTHONPATH": "/run/snapshot:/home/u/lib"}, environ)
    environ |= launched_worker_env("an agent", FACTS, environ, ["/run/snapshot"]).environ
    environ |= probe_variables(Path("/tmp/probes"), is_alone=True)
    environ |= with_undo_record({"PYTHONPATH": "/run/snapshot/lib:/home/u/lib", "TORCHELASTIC_RUN_ID": "a"}, environ)
    assert (environ["RANK"], environ["MASTER_ADDR"]) == ("3", "10.0.0.1")

    assert users_environ({**environ, "OMP_NUM_THREADS": "17"}) == {**users, "OMP_NUM_THREADS": "17"}
    assert users_environ(users) == users
    assert users_environ({**users, GIVEN_VARIABLE: "{", TABLE_VARIABLE: "{"}) == users


# --- what each launcher's workers find ---------------------------------------------------------------------------------

WORKER = """
import json, os
from pathlib import Path

folder = Path(__file__).parent
os.environ["RES_OPTIONS"] = "timeout:3"  # what the user's code sets when it is imported is the user's

def preload(run):
    return "it left a thread running" if (folder / "unforkable").exists() else ""

def main(run, environ, *, attempt, listen_fd):
    found = folder / f"rank-{environ['RANK']}.json"
    found.with_suffix(".new").write_text(json.dumps(dict(environ)))
    found.with_suffix(".new").rename(found)
    return 0
"""
TORCHRUNS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
"""What torchrun gives a worker beside its ranks and endpoint."""
NOBODYS = {
    "LC_CTYPE",
    "COLUMNS",
    "LINES",
    "PYTHONSAFEPATH",
    USERS_CODE,
    GIVEN_VARIABLE,
    CPUS_BEFORE,
    PROBE_FOLDER,
    PROBES_ITSELF,
}
"""Python sets the first, pytest the next two; the last ones are for ddp_hpc itself."""


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    with signals_held_back():
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "telling_worker.py").write_text(WORKER)
    return make_run(tmp_path)


def base_environ(run: RunDir, **more: str) -> dict[str, str]:
    """Return what the supervisor hands down."""
    code = str(run.path.parent / "code")
    return {"PATH": os.environ["PATH"], IMPORT_PATH_NAME: code, "CUBLAS_WORKSPACE_CONFIG": ":16:8", **more}


def by_agent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ = base_environ(run)
    for name in [*os.environ]:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    words = ["--worker", "telling_worker", "--num-workers", "2"]
    agents = AgentWorkers(
        [sys.executable, "-m", "ddp_hpc.job.node.agent", str(run.path), *words], num_nodes=1, lock_fds=[]
    )
    agents.begin(0, None)
    assert await_news(agents) == 0
    agents.close()
    return environ


def by_spawning_agent(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (run.path.parent / "code" / "unforkable").touch()
    return by_agent(run, monkeypatch)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def by_srun(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    environ = base_environ(run)
    meet = f"127.0.0.1 {free_port()}"
    argv = [sys.executable, "-m", "ddp_hpc.job.node.task", str(run.path), "--worker=telling_worker", "--attempt=0"]
    for rank in range(2):
        environ |= task(rank, 0, rank, on="node1", nodes="node1", tasks="2", SLURM_NTASKS="2", SLURM_CPUS_PER_TASK="1")
        subprocess.run([*argv, "--meet", meet], env=environ, check=True)
    return environ


def by_torchrun(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    slurms = task(0, 0, 0, on="node1", nodes="node1", tasks="1", SLURM_CPUS_PER_TASK="2")
    environ = base_environ(run, **slurms)
    port = free_port()
    write_rendezvous_token(run.rendezvous_token(0))
    where = [f"--run={run.path}", "--attempt=0", f"--meet=127.0.0.1 {port}"]
    node = [*where, "--num-workers=2", "--"]
    options = ["--nnodes=1", "--nproc-per-node=2"]
    worker = ["-m", "ddp_hpc.job.node.task", str(run.path), "--worker=telling_worker", "--attempt=0"]
    argv = [sys.executable, "-m", "ddp_hpc.job.node.torchrun_node", *node, *options, *worker]
    subprocess.run(argv, env=environ, check=True)
    return environ


@pytest.mark.parametrize(
    "start", [by_agent, by_spawning_agent, by_srun, pytest.param(by_torchrun, marks=pytest.mark.long)]
)
def test_workers_find_what_their_table_says_and_nothing_else_of_ours(
    start: Callable[[RunDir, pytest.MonkeyPatch], Mapping[str, str]],
    run: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held against `os.environ` as the worker's code sees it: /proc/PID/environ of a forked worker is its agent's."""
    environ = start(run, monkeypatch)

    for rank in range(2):
        found = json.loads((run.path.parent / "code" / f"rank-{rank}.json").read_text())
        table = read_worker_env(found)
        assert table is not None
        carried = json.loads(found[TABLE_VARIABLE])[
            "variables"
        ]  # as the launcher wrote it; the recipe sets RES_OPTIONS
        differ = {name for name, row in carried.items() if found.get(name) != row[0]}
        assert differ <= {"RES_OPTIONS"}
        slurms = {name for name in table.variables if name.startswith("SLURM_")}
        assert table.variables.keys() - slurms == ALL_NAMES
        if start in (by_srun, by_torchrun):  # srun sets these, and torchrun's workers are no tasks of a step
            assert [found[f"SLURM_{name}"] for name in ("PROCID", "LOCALID", "NODEID")] == [str(rank), str(rank), "0"]
            assert bool(slurms) == (start is by_torchrun)
        assert Path(found[PROBE_FOLDER]).name.startswith(".ddp-hpc-ranks-")
        assert (PROBES_ITSELF in found) == (start in (by_srun, by_torchrun))
        assert [table.value(name) for name in RANKS] == [str(rank), str(rank), "2", "2", "0"]
        assert (table.value("GLOO_SOCKET_IFNAME"), table.value("NCCL_SOCKET_IFNAME")) == ("lo", "=lo")
        assert (table.value("RES_OPTIONS"), table.value("CUBLAS_WORKSPACE_CONFIG")) == ("timeout:3", ":16:8")
        users = {name for name, fact in table.variables.items() if fact.source == "environment"}
        assert users == {"RES_OPTIONS", "CUBLAS_WORKSPACE_CONFIG"}
        new = {name for name in found.keys() - environ.keys() if not name.startswith(TORCHRUNS)}
        assert new - NOBODYS == {*table.given, "RES_OPTIONS", TABLE_VARIABLE} - (slurms & environ.keys())


@pytest.mark.parametrize("text", ["", "{", "null", "[]", '{"process": "x", "variables": {"RANK": []}}'])
def test_a_table_that_somebody_has_cut_is_none(text: str) -> None:
    assert read_worker_env({TABLE_VARIABLE: text}) is None
