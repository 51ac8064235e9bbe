"""What starts the workers, and where they meet."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from ddp_hpc.cluster.slurm.steps import probe_argv
from ddp_hpc.job.launcher import STEP_ARGV_BY_LAUNCHER, agent_argv, agents_step_argv
from ddp_hpc.job.wire.endpoint import Endpoint, PortTakenError, listen
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import DataSpec, ResourcesSpec, RunSpec, SlurmSpec, TorchrunSpec, TrainSpec
from tests.made_launch import launch_of

RUN = RunDir(Path("/scratch/runs/digits"))


def start(*, address: str = "10.0.0.1", launcher: str = "agent") -> list[str]:
    """Return the command that starts two nodes of four workers each, with three CPUs a worker."""
    spec = RunSpec(
        name="digits",
        resources=ResourcesSpec(nodes=2, gpus_per_node=4),
        data=DataSpec(num_workers=2),
        slurm=SlurmSpec(srun_args=("--cpu-bind=none",)),
        torchrun=TorchrunSpec(max_restarts=3),
        train=TrainSpec(global_batch_size=64),
    )
    if launcher == "agent":
        return agents_step_argv(launch_of(spec, RUN))
    return STEP_ARGV_BY_LAUNCHER[launcher](launch_of(spec, RUN), 2, Endpoint(address, 29500))


SHAPES = {
    "agent": ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=12"],
    "srun": ["--ntasks=8", "--ntasks-per-node=4", "--cpus-per-task=3"],
    "torchrun": ["--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=12"],
}


def test_every_launcher_has_its_shape_here() -> None:
    assert SHAPES.keys() == {*STEP_ARGV_BY_LAUNCHER, "agent"}


@pytest.mark.parametrize("launcher", SHAPES)
def test_the_step_names_nodes_tasks_and_cpus(launcher: str) -> None:
    argv = start(launcher=launcher)

    assert argv[:5] == ["srun", "--nodes=2", *SHAPES[launcher]]


@pytest.mark.parametrize("launcher", SHAPES)
def test_the_users_own_arguments_of_srun_come_last_and_before_the_command(launcher: str) -> None:
    argv = start(launcher=launcher)

    command = argv.index(sys.executable)
    assert argv[command - 1] == "--cpu-bind=none"
    assert all(word.startswith("--") for word in argv[1:command])


@pytest.mark.parametrize("step", [*SHAPES, "probe"])
def test_a_job_that_was_submitted_without_its_environment_starts_steps_with_it(step: str) -> None:
    """`--export=NONE` leaves SLURM_EXPORT_ENV=NONE in the job, which an option on srun's command line overrides."""
    argv = probe_argv(2) if step == "probe" else start(launcher=step)

    assert "--export=ALL" in argv


@pytest.mark.parametrize("launcher", SHAPES)
def test_no_rank_is_kept_from_the_gpus_of_its_peers(launcher: str) -> None:
    assert not [word for word in start(launcher=launcher) if word.startswith(("--gpus-per-task", "--gpu-bind"))]


@pytest.mark.parametrize("launcher", SHAPES)
def test_a_task_that_fails_takes_the_step_with_it(launcher: str) -> None:
    assert "--kill-on-bad-exit=1" in start(launcher=launcher)


@pytest.mark.parametrize(
    ("launcher", "module"), [("srun", "ddp_hpc.job.node.task"), ("torchrun", "ddp_hpc.job.node.torchrun_node")]
)
def test_what_is_started_is_told_where_to_meet_in_one_word(launcher: str, module: str) -> None:
    argv = start(launcher=launcher)

    assert argv[argv.index(sys.executable) :][:3] == [sys.executable, "-m", module]
    assert argv[argv.index("--meet") + 1] == "10.0.0.1 29500"


def test_agents_are_started_once_for_all_attempts_and_told_of_each_by_their_line() -> None:
    argv = start(launcher="agent")

    assert argv[argv.index(sys.executable) :] == [
        *[sys.executable, "-m", "ddp_hpc.job.node.agent", str(RUN.path), "--worker", "ddp_hpc.train.worker"],
        *["--stop-signal", "USR2", "--teardown-s", "60", "--num-workers", "4", "--gpus", "4", "--in-step"],
    ]


@pytest.mark.parametrize("launcher", STEP_ARGV_BY_LAUNCHER)
def test_the_task_is_told_its_run_worker_and_attempt(launcher: str) -> None:
    argv = start(launcher=launcher)

    at = argv.index(str(RUN.path))
    assert argv[at:][:5] == [str(RUN.path), "--worker", "ddp_hpc.train.worker", "--attempt", "2"]


def test_torchrun_gets_its_options_and_the_task_as_a_module() -> None:
    argv = start(launcher="torchrun")

    options, task = argv[argv.index("--") + 1 :][:3], argv[argv.index("--") + 4 :]
    assert options == [
        "--nnodes=2",
        "--nproc-per-node=4",
        "--max-restarts=3",
    ]
    assert task[:2] == ["-m", "ddp_hpc.job.node.task"]


@pytest.mark.parametrize(("cpus", "words"), [(None, []), (5, ["--cpus-per-worker", "5"])])
def test_an_agent_is_told_of_cpus_only_where_they_were_asked_for(cpus: int | None, words: list[str]) -> None:
    spec = RunSpec(name="digits", resources=ResourcesSpec(workers_per_node=4, cpus_per_worker=cpus))

    argv = agent_argv(launch_of(spec, RUN))

    assert argv[argv.index("--num-workers") :] == ["--num-workers", "4", *words]


@pytest.mark.parametrize(
    ("endpoint", "text", "netloc"),
    [
        (Endpoint("10.0.0.1", 29500), "10.0.0.1 29500", "10.0.0.1:29500"),
        (Endpoint("fd00::1", 1), "fd00::1 1", "[fd00::1]:1"),
        (Endpoint("fe80::1%eth0", 65535), "fe80::1%eth0 65535", "[fe80::1%eth0]:65535"),
    ],
)
def test_an_endpoint_is_read_as_it_was_written(endpoint: Endpoint, text: str, netloc: str) -> None:
    assert str(endpoint) == text
    assert Endpoint.parse(text) == endpoint
    assert endpoint.netloc == netloc


@pytest.mark.parametrize("text", ["", "10.0.0.1", "10.0.0.1:29500", "10.0.0.1 port"])
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Endpoint.parse(text)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ADDRESSES = ["127.0.0.1", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here"))]


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_port_that_is_taken_is_told_from_other_errors(address: str) -> None:
    with listen(Endpoint(address, 0)) as first:
        taken = Endpoint(address, first.getsockname()[1])

        with pytest.raises(PortTakenError, match=f"{address} {taken.port}"):
            listen(taken)


def test_a_port_that_is_taken_on_all_addresses_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as somebody:  # noqa: S104  # as somebody else's server does
        taken = Endpoint("127.0.0.1", somebody.getsockname()[1])

        with pytest.raises(PortTakenError):
            listen(taken)


def test_an_address_that_is_not_this_nodes_is_no_taken_port() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        listen(Endpoint("192.0.2.1", 0))


def test_nobody_hears_on_another_address() -> None:
    with listen(Endpoint("127.0.0.1", 0)) as ours:
        port = ours.getsockname()[1]

        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize("address", ADDRESSES)
def test_who_knocks_before_anybody_answers_is_kept(address: str) -> None:
    with listen(Endpoint(address, 0)) as ours:
        knocks = [socket.create_connection(ours.getsockname()[:2], timeout=5) for _ in range(64)]

        for knock in knocks:
            knock.close()
