"""The same run as on one machine, on many nodes, by one command."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from ddp_hpc.cluster.rendezvous.ports import candidate_ports
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import FAULTY, RECIPE, assert_unbroken, await_done, await_first_end, await_step, slow_file
from tests.slurm.runs import SMALL, TRIAL_RECIPE, LoginNode, world


@pytest.mark.long
def test_digits_train_on_two_nodes_to_the_bits_of_the_local_run_over_the_fast_network(
    cluster: Cluster, login: LoginNode
) -> None:
    before = {name: cluster.interface_bytes("node1", name)[1] for name in ("eth0", "ib0")}

    short = "train.epochs=10"

    said = login.submit("digits", short, *world(2, 2), "--wait")

    sent = {name: cluster.interface_bytes("node1", name)[1] - before[name] for name in before}
    accuracy = re.search(r"accuracy (\S+)", said)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97
    assert sent["ib0"] > 17e6  # 150 steps of gradients
    assert sent["eth0"] < 5e6
    local = login.type("submit", "digits.yaml", "name=local", "--cluster", "local", "--wait", short, *world(1, 4))
    assert local.returncode == 0, local.stderr
    assert login.digest("digits") == login.digest("local")


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_every_launcher_comes_to_the_same_bits(login: LoginNode, launcher: str) -> None:
    login.submit("agent", *SMALL, *world(2, 2), "--wait")

    login.submit(launcher, *SMALL, *world(2, 2), f"launcher={launcher}", "--wait")

    assert login.digest(launcher) == login.digest("agent")


@pytest.mark.long
def test_a_rendered_script_does_the_same_by_plain_sbatch(cluster: Cluster, login: LoginNode) -> None:
    login.submit("submitted", *SMALL, *world(2, 1), "--wait")
    rendered = login.type("render", "digits.yaml", "name=rendered", "-o", "job.sbatch", *SMALL, *world(2, 1))
    assert rendered.returncode == 0, rendered.stderr

    bare = {"PATH": "/usr/bin:/bin"}
    cluster.run("sbatch", "job.sbatch", cwd=login.folder, env=bare)

    cluster.wait_for(login.run("rendered").done.exists, 180)
    assert login.digest("rendered") == login.digest("submitted")


@pytest.mark.long
def test_a_dry_run_prints_what_sbatch_gets_byte_for_byte(login: LoginNode) -> None:
    comment = 'it\'s a "test" # %j $HOME'
    settings = [*SMALL, *world(1, 1), f"slurm.extra.comment={comment}", "slurm.extra.begin=now+1hour"]
    dry = login.type("submit", "digits.yaml", "name=dry", "--cluster", "slurm", "--dry-run", *settings)
    assert not login.run("dry").path.exists()

    login.submit("dry", *settings)

    assert login.run("dry").job_script.read_text() == dry.stdout
    (sent,) = login.run("dry").submitit.glob("*_submission.sh")
    assert sent.read_text() == dry.stdout


def test_a_comment_reaches_slurm_as_it_was_written(cluster: Cluster, login: LoginNode) -> None:
    comment = 'it\'s a "test" # %j $HOME \\ `x`; exit'
    login.queue("comment", f"slurm.extra.comment={comment}")

    listed = cluster.run("squeue", "--noheader", "--format=%k").stdout.rstrip("\n")

    assert listed == comment


@pytest.mark.long
@pytest.mark.timeout(900)  # of twenty jobs, forty processes import torch on the cores of one machine
@pytest.mark.parametrize("num_jobs", [4, pytest.param(20, marks=pytest.mark.campaign)])
def test_jobs_at_once_on_a_pair_of_nodes_do_not_disturb_each_other(
    num_jobs: int, cluster: Cluster, login: LoginNode
) -> None:
    login.add_recipe(TRIAL_RECIPE)
    names = [f"many-{number}" for number in range(num_jobs)]
    small = ["recipe.target=trial_recipe:build", "recipe.args={}", "train.max_steps=3", *world(2, 1)]
    place = ["resources.mem_gb=1", "slurm.nodelist=node1,node2", "slurm.extra.hold=true"]
    for name in names:
        login.submit(name, *small, *place)
    held = cluster.run("squeue", "--noheader", "--format=%i").stdout.split()

    cluster.run("scontrol", "release", ",".join(held))
    running = ["squeue", "--noheader", "--states=running", "--format=%i"]
    cluster.wait_for(lambda: len(cluster.run(*running).stdout.split()) == len(names), 120)
    cluster.wait_for(lambda: all(login.run(name).done.exists() for name in names), 300)

    assert len({login.digest(name) for name in names}) == 1
    ports = [re.search(r"ranks meet at \S+ port (\d+)", login.console(name)) for name in names]
    assert len({port[1] for port in ports if port}) == len(names)


@pytest.mark.long
def test_a_port_that_is_taken_is_passed_over(cluster: Cluster, login: LoginNode) -> None:
    login.submit("first", *SMALL, *world(2, 1), "slurm.nodelist=node1,node2", "--wait")
    found = re.search(r"ranks meet at (\S+) port (\d+)", login.console("first"))
    assert found is not None
    address, port = found[1], int(found[2])
    assert port == next(candidate_ports(login.status("first")["job_id"]))
    login.submit("second", *SMALL, *world(2, 1), "slurm.nodelist=node1,node2", "slurm.extra.hold=true")
    job = login.status("second")["job_id"]
    taken, following = islice(candidate_ports(job), 2)
    listen = f"import socket, time; s = socket.create_server(('{address}', {taken})); print('up', flush=True); time.sleep(600)"
    squatter = cluster.popen("python3", "-c", listen, node="node1")
    assert squatter.stdout is not None
    assert squatter.stdout.readline() == "up\n"

    cluster.run("scontrol", "release", job)
    await_done(login, "second")

    assert re.findall(r"ranks meet at \S+ port (\d+)", login.console("second")) == [str(following)]
    assert login.digest("second") == login.digest("first")


@pytest.mark.long
def test_a_run_stopped_on_the_cluster_goes_on_there_to_the_same_bits(login: LoginNode) -> None:
    login.add_recipe(RECIPE)
    asked, slow = [*FAULTY, *world(2, 2)], slow_file(login)
    login.submit("stopped", *asked, f"recipe.args.slow_while={slow}")
    await_step(login, "stopped")

    assert login.type("stop", "stopped").returncode == 0
    await_first_end(login, "stopped")
    stopped = login.await_state("stopped", "stopped", "finished")
    slow.unlink()
    login.submit("stopped", *asked, "--wait")

    assert stopped["state"] == "stopped"
    assert_unbroken(login, "stopped", world_size=4)
