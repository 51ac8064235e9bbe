"""Runs that another program has started: two nodes as two process groups on loopback, by the variables of each launcher."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from ddp_hpc.base import processes
from ddp_hpc.cluster.rendezvous.ports import candidate_ports, is_free
from ddp_hpc.run.run_dir.joined_ranks import read_missing
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.records import read_progress
from tests.distributed.whole_runs import Workplace, make_workplace
from tests.unit.made_network import task

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = """
recipe: {target: "trial_recipe:build", args: {num_samples: 24}}
train: {max_steps: 12, global_batch_size: 4}
checkpoint: {every_steps: 3}
"""
PATIENCE_S = 120.0
LOOPBACK = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
JOIN = [sys.executable, "-m", "ddp_hpc", "join", "trial.yaml"]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this should have come about by now"
        time.sleep(0.02)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path, TEXT)


@pytest.fixture
def port() -> str:
    return str(next(port for port in candidate_ports(str(time.monotonic_ns())) if is_free("127.0.0.1", port)))


def start(workplace: Workplace, argv: Sequence[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        cwd=workplace.path,
        env={**workplace.environ, **LOOPBACK, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a node of its own, as far as a process can be one
    )


def ends(started: Sequence[subprocess.Popen[str]]) -> list[int]:
    """Wait for the end of all; return their exit codes, and print what they have printed."""
    for process in started:
        sys.stdout.write(process.communicate(timeout=PATIENCE_S)[0])
    return [process.returncode for process in started]


def attempts(workplace: Workplace, name: str = "trial") -> list[Attempt]:
    return list(Ledger.read(workplace.run(name)).attempts)


def alone(workplace: Workplace) -> str:
    """Return the digest of the same training by two workers that ddp-hpc itself has started."""
    return workplace.finish("alone", "resources.workers_per_node=2", "--cluster", "local")


def skypilot(node: int, port: str) -> dict[str, str]:
    ips = "127.0.0.1\n127.0.0.1"
    return {
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NODE_IPS": ips,
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "0",
        "MASTER_PORT": port,
    }


def kubeflow(node: int, port: str) -> dict[str, str]:
    return {
        "PET_NNODES": "2",
        "PET_NODE_RANK": str(node),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": port,
    }


def open_mpi(rank: int, port: str) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


@pytest.mark.long
@pytest.mark.parametrize(
    "environ_of",
    [
        pytest.param(skypilot, marks=pytest.mark.long),
        pytest.param(kubeflow, marks=pytest.mark.long),
        open_mpi,  # a process for each worker; the others start torchrun, which imports torch once more on each node
    ],
)
def test_two_nodes_of_another_launcher_train_as_two_workers_of_ours(
    environ_of: Callable[[int, str], dict[str, str]], workplace: Workplace, port: str
) -> None:
    codes = ends([start(workplace, JOIN, environ_of(node, port)) for node in (1, 0)])

    assert codes == [0, 0]
    (attempt,) = attempts(workplace)
    assert (attempt.ending, attempt.last_step) == ("finished", 12)
    assert workplace.digest("trial") == alone(workplace)


@pytest.mark.long
def test_all_processes_of_a_run_that_has_finished_are_told_so(workplace: Workplace, port: str) -> None:
    def both() -> list[int]:
        return ends([start(workplace, JOIN, open_mpi(rank, port)) for rank in (0, 1)])

    assert both() == [0, 0]
    workplace.run("trial").config.write_text("train: {epochs: nope}\n")  # nothing of it is needed any more
    assert both() == [0, 0]

    assert len(attempts(workplace)) == 1


@pytest.mark.long
def test_nodes_named_by_hand_stop_at_a_signal_and_go_on_when_they_are_started_again(
    workplace: Workplace, port: str
) -> None:
    def node(number: int, *more: str) -> subprocess.Popen[str]:
        place = ("--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}")
        return start(workplace, [*JOIN, *place, *more], {})

    slow = "recipe.args.load_s=0.2"
    nodes = [node(0, slow), node(1, slow)]
    until(lambda: (progress := read_progress(workplace.run("trial"))) is not None and progress.step >= 1)
    nodes[1].send_signal(signal.SIGTERM)  # one node is to be taken away: all ranks agree to stop, and both nodes say so

    assert ends(nodes) == [99, 99]
    (stopped,) = attempts(workplace)
    assert stopped.ending == "stopped"
    assert 0 < (stopped.last_step or 0) < 12

    assert ends([node(0), node(1)]) == [0, 0]
    assert attempts(workplace)[-1].first_step == stopped.last_step
    assert workplace.digest("trial") == alone(workplace)


@pytest.mark.long
def test_torchrun_restarts_a_killed_worker_and_the_run_resumes(workplace: Workplace, port: str) -> None:
    slow = "recipe.args.load_s=0.1"
    argv = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--master-addr=127.0.0.1",
        f"--master-port={port}",
    ]
    argv += ["--nproc-per-node=1", "--max-restarts=1"]
    nodes = [
        start(workplace, [*argv, f"--node-rank={n}", "-m", "ddp_hpc", "join", "trial.yaml", slow], {}) for n in (0, 1)
    ]
    until(
        lambda: (progress := read_progress(workplace.run("trial"))) is not None and (progress.last_checkpoint or 0) >= 3
    )
    (worker,) = psutil.Process(nodes[1].pid).children()
    worker.kill()

    assert ends(nodes) == [0, 0]
    first, second = attempts(workplace)
    assert (first.ending, second.ending) == ("failed", "finished")
    assert second.first_step >= 3
    assert workplace.digest("trial") == alone(workplace)


@pytest.mark.long
def test_a_users_own_script_runs_on_two_nodes_of_another_launcher(workplace: Workplace, port: str) -> None:
    (workplace.path / "sum.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "ranks = torch.tensor([dist.get_rank() + 1])\n"
        "dist.all_reduce(ranks)\n"
        "print('the sum is', int(ranks), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    argv = [sys.executable, "-m", "ddp_hpc", "join", "--", "python", "sum.py"]

    assert ends([start(workplace, argv, skypilot(node, port)) for node in (0, 1)]) == [0, 0]
    for rank in (0, 1):
        assert "the sum is 3" in workplace.run("sum").rank_log(0, rank).read_text()


@pytest.mark.long
def test_a_script_that_is_the_only_worker_forms_its_group(workplace: Workplace, port: str) -> None:
    (workplace.path / "alone.py").write_text(
        "import datetime, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=10))\n"
        "print('the group has', dist.get_world_size(), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": port}
    argv = [sys.executable, "-m", "ddp_hpc", "join", "--", "python", "alone.py"]

    codes = ends([start(workplace, argv, {**alone, "MASTER_ADDR": "127.0.0.1"})])

    assert codes == [0], workplace.run("alone").rank_log(0, 0).read_text()
    assert "the group has 1" in workplace.run("alone").rank_log(0, 0).read_text()


@pytest.mark.long
def test_a_script_that_asks_to_be_started_again_has_its_node_exit_with_99_until_it_has_finished(
    workplace: Workplace, port: str
) -> None:
    script = ("sh", "-c", "test -e saved || { touch saved; exit 7; }")
    settings = ("name=again", "script.resume_exit_codes=[7]")
    argv = [sys.executable, "-m", "ddp_hpc", "join", *settings, "--", *script]

    codes = [
        ends(
            [start(workplace, argv, {**skypilot(0, port), "SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_NODES": "1"})]
        )
        for _ in range(3)
    ]

    assert codes == [[99], [0], [0]]
    assert len(attempts(workplace, "again")) == 2


@pytest.mark.parametrize("name", [*(pytest.param(one, marks=pytest.mark.long) for one in ("INT", "HUP")), "KILL"])
def test_no_process_outlives_a_join_whose_terminal_or_user_ends_it(name: str, workplace: Workplace, port: str) -> None:
    place = ("--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", f"--master-port={port}")
    script = ("sh", "-c", "echo $$ > started.part; mv started.part started; exec sleep 600")
    node = start(workplace, [sys.executable, "-m", "ddp_hpc", "join", "name=waits", *place, "--", *script], {})
    until((workplace.path / "started").exists)
    below = psutil.Process(node.pid).children(recursive=True)

    node.send_signal(processes.signal_number(name))

    try:
        assert node.wait(timeout=PATIENCE_S) == (-9 if name == "KILL" else 99)
        assert int((workplace.path / "started").read_text()) in {one.pid for one in below}
        assert psutil.wait_procs(below, timeout=PATIENCE_S)[1] == []
    finally:
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        ends([node])


PBSDSH = """#!/bin/bash
# A stand-in for pbsdsh on one host: starts the command once for each line of PBS_NODEFILE, with next to no environment, as PBS does.
shift
for number in 0 1; do
  env -i PATH=/usr/bin:/bin HOME="$HOME" OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PBS_NODENUM=$number PBS_JOBID="$PBS_JOBID" "$@" &
done
wait
"""


@pytest.mark.long
def test_the_example_for_pbs_stops_in_time_and_goes_on_with_a_stand_in_for_pbsdsh(workplace: Workplace) -> None:
    bin_dir = workplace.path / "bin"
    bin_dir.mkdir()
    (bin_dir / "pbsdsh").write_text(PBSDSH)
    (bin_dir / "pbsdsh").chmod(0o755)
    (workplace.path / ".venv").symlink_to(sys.prefix)
    (workplace.path / "nodes").write_text("localhost\nlocalhost.\n")
    slow = workplace.config.read_text().replace("num_samples: 24", "num_samples: 24, load_s: 0.2")
    (workplace.path / "my_run.yaml").write_text(slow)
    script = workplace.path / "pbs_job.sh"
    script.write_text((EXAMPLES / "pbs_job.sh").read_text())
    environ = {
        "PATH": f"{bin_dir}:/usr/bin:/bin",
        "PBS_O_WORKDIR": str(workplace.path),
        "PBS_NODEFILE": str(workplace.path / "nodes"),
        "PBS_JOBID": f"{time.monotonic_ns() % 20000}.server",
    }
    argv = ["/bin/bash", str(script)]

    job = start(workplace, argv, environ)
    until(lambda: (progress := read_progress(workplace.run("my_run"))) is not None and progress.step >= 1)
    job.send_signal(signal.SIGTERM)  # to the script alone
    assert ends([job]) == [0]
    assert ends([start(workplace, argv, environ)]) == [0]

    stopped, finished = attempts(workplace, "my_run")
    assert (stopped.ending, finished.ending, finished.last_step) == ("stopped", "finished", 12)
    assert finished.first_step == stopped.last_step


@pytest.mark.long
def test_the_example_for_kubeflow_trains_on_its_nodes_with_the_variables_that_trainer_sets(
    workplace: Workplace, port: str
) -> None:
    trainer = yaml.safe_load((EXAMPLES / "kubeflow_trainjob.yaml").read_text())["spec"]["trainer"]
    assert trainer["command"] == ["python3", *JOIN[1:4]]
    settings = [f"runs_dir={workplace.path}/runs" if word == "runs_dir=/runs" else word for word in trainer["args"]]
    argv = [*JOIN[:4], *settings, "train.max_steps=12"]

    def node(number: int) -> subprocess.Popen[str]:
        given = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"])}
        return start(workplace, argv, {**kubeflow(number, port), **given})

    assert ends([node(number) for number in range(trainer["numNodes"])]) == [0, 0]
    (attempt,) = attempts(workplace, "digits")
    assert (attempt.ending, attempt.last_step) == ("finished", 12)


def test_a_process_that_nobody_has_placed_is_refused_with_what_to_do(workplace: Workplace) -> None:
    done = workplace.command("join", "trial.yaml")

    assert done.returncode == 2
    assert "--nnodes" in done.stderr
    assert "ddp-hpc submit" in done.stderr


def test_a_place_given_by_hand_counts_in_a_task_of_srun(workplace: Workplace) -> None:
    in_task = Workplace(
        workplace.path, {**workplace.environ, **task(0, 0, 0, on="node1", nodes="node[1-2]", tasks="1(x2)")}
    )

    done = in_task.command("join", "trial.yaml", "--nnodes=3", "--node-rank=3", "--master-addr=127.0.0.1")

    assert done.returncode == 2
    assert "PET_NODE_RANK is 3, but the job has 3 nodes" in done.stderr


def test_env_says_which_launcher_it_recognises(workplace: Workplace) -> None:
    named = Workplace(workplace.path, {**workplace.environ, **LOOPBACK, **skypilot(1, "29500")})

    printed = named.command("env")

    assert printed.returncode == 0, printed.stderr
    assert "node 1 of 2, started by SkyPilot (recognised by SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS)" in printed.stdout


def test_a_rank_that_waits_for_the_others_stops_at_a_stop_signal(workplace: Workplace, port: str) -> None:
    rank_zero = start(workplace, JOIN, open_mpi(0, port))
    until(lambda: rank_zero.poll() is not None or not is_free("127.0.0.1", int(port)))

    rank_zero.send_signal(signal.SIGUSR2)

    assert ends([rank_zero]) == [99]
    assert attempts(workplace) == []


@pytest.mark.long
def test_rank_zero_writes_which_rank_the_others_wait_for_within_a_minute(workplace: Workplace, port: str) -> None:
    workplace.finish("trial", "resources.workers_per_node=2", "train.max_steps=3", "--cluster", "local")
    run = workplace.run("trial")
    code = "import os, sys; from ddp_hpc.train import worker; worker.main(sys.argv[1], os.environ, attempt=0)"
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"}
    began = time.monotonic()
    zero = start(
        workplace,
        [sys.executable, "-c", code, str(run.path)],
        {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
    )
    try:
        until(lambda: zero.poll() is not None or read_missing(run, 0))
        took_s = time.monotonic() - began
        missing = read_missing(run, 0)
    finally:
        zero.kill()
        printed = zero.communicate()[0]

    assert missing is not None, printed
    assert (missing.ranks, missing.node_of(2, ["a", "b", "c"])) == ((1, 2), "c")
    assert took_s < 60
