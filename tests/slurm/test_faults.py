"""What breaks around a run does not harm it, and `status` says what it knows."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.slurm.cluster import USER, Cluster
from tests.slurm.runs import SMALL, TRIAL_RECIPE, LoginNode, world

LONG = ("train.epochs=400", "checkpoint.every_steps=50", "eval.every_epochs=400", "log.every_steps=20")
"""Settings of a run that outlasts a test."""


@pytest.mark.long
def test_a_run_goes_on_without_the_accounting_database(cluster: Cluster, login: LoginNode) -> None:
    cluster.stop_dbd()

    login.submit("digits", *SMALL, *world(2, 1), "--wait")

    status = login.status("digits")
    assert (status["state"], status["source"]) == ("finished", "run directory")


@pytest.mark.long
def test_a_controller_that_is_away_harms_no_run_and_status_says_what_it_knows(
    cluster: Cluster, login: LoginNode
) -> None:
    login.submit("digits", *LONG, *world(2, 1))
    login.submit("waiting", *SMALL, "slurm.extra.begin=now+1hour")
    login.await_state("digits", "running")
    before = login.status("waiting")

    cluster.stop_controller()
    since = login.status("digits")["step"]
    time.sleep(30)  # what is to be shown is that such a long time does no harm
    meanwhile = login.status("digits")
    unknown = login.type("submit", "digits.yaml", "name=new", "--cluster", "slurm", *SMALL)
    cluster.start_controller()
    cluster.wait_for(lambda: login.status("digits")["step"] > meanwhile["step"], 120)

    assert before["state"] == "waiting"
    assert "start" in before["reason"]
    assert (meanwhile["state"], meanwhile["source"]) == ("running", "run directory")
    assert meanwhile["step"] > since
    assert unknown.returncode == 1
    assert "Slurm does not answer" in unknown.stderr
    assert not login.run("new").path.exists()
    assert login.type("cancel", "digits").returncode == 0
    assert login.status("digits")["state"] == "cancelled"


@pytest.mark.long
def test_a_queued_job_runs_the_code_as_it_was_at_submit(cluster: Cluster, login: LoginNode) -> None:
    recipe = login.add_recipe(TRIAL_RECIPE)
    mine = ["recipe.target=trial_recipe:build", "recipe.args={}", *SMALL, *world(2, 1)]
    login.submit("before", *mine, "--wait")
    login.submit("edited", *mine, "slurm.extra.begin=now+5")
    recipe.write_text("raise RuntimeError('edited after submit')\n")

    edited = login.await_state("edited", "finished", "failed", "refused")
    fails = login.type("submit", "digits.yaml", "name=now", "--cluster", "slurm", *mine, "--wait")

    assert edited["state"] == "finished"
    assert login.digest("edited") == login.digest("before")
    assert fails.returncode == 2
    assert "edited after submit" in fails.stderr


def test_a_job_cancelled_behind_our_back_is_told_by_slurm(cluster: Cluster, login: LoginNode) -> None:
    login.queue("digits")
    job = login.status("digits")["job_id"]

    cluster.run("scancel", job)
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 90)
    cluster.run("rm", "-rf", ".cache", cwd=Path("/home") / USER)
    status = login.status("digits")

    assert status["state"] == "cancelled"
    assert status["slurm_state"].startswith("CANCELLED")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["slurm.partition=nope"], ["'nope'", "batch (4 nodes)", "Set `slurm.partition` to one of them"]),
        pytest.param(
            *([*world(8, 1)], ["`resources.nodes` is 8", "partition batch has 4 nodes"]), marks=pytest.mark.long
        ),
        pytest.param(["slurm.account=nope"], ["'nope'", "you may use lab", "QOS high"], marks=pytest.mark.long),
        pytest.param(["slurm.qos=nope"], ["'nope'", "you may use lab"], marks=pytest.mark.long),
        pytest.param(["runs_dir=/tmp/runs"], ["/tmp/runs/wrong", "of its own", "runs_dir"], marks=pytest.mark.long),
        pytest.param(
            *(["resources.mem_gb=999"], ["`resources.mem_gb` is 999", "a node of partition batch has at most"]),
            marks=pytest.mark.long,
        ),
    ],
    ids=["partition", "nodes", "account", "qos", "private directory", "memory"],
)
def test_what_the_cluster_refuses_is_one_error_that_says_what_it_has_and_leaves_nothing(
    login: LoginNode, settings: list[str], told: list[str]
) -> None:
    done = login.type("submit", "digits.yaml", "name=wrong", "--cluster", "slurm", *SMALL, *settings)

    assert done.returncode == 2
    assert done.stderr.count("error: ") == 1
    assert [words for words in told if words not in done.stderr] == []
    assert not login.run("wrong").path.exists()


@pytest.mark.long
def test_a_worker_that_fails_on_another_node_is_named_with_its_exception(login: LoginNode) -> None:
    (login.folder / "breaks.py").write_text(
        "import os, torch\n"
        "from ddp_hpc.train.recipes import image_classification\n"
        "def build():\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('broken on purpose')\n"
        "    return image_classification.build()\n"
    )
    words = ["recipe.target=breaks:build", "recipe.args={}", *SMALL, *world(2, 1)]

    done = login.type("submit", "digits.yaml", "name=broken", "--cluster", "slurm", *words, "--wait")

    assert done.returncode == 1
    assert "rank 1 on node2 failed first" in done.stderr
    assert "RuntimeError: broken on purpose" in done.stderr


@pytest.mark.long
def test_a_node_that_does_not_see_the_runs_directory_is_told_of(cluster: Cluster, login: LoginNode) -> None:
    runs = login.folder / "runs"
    login.submit("first", *SMALL, "slurm.nodelist=node1", "--wait")
    cluster.run("mount", "-t", "tmpfs", "tmpfs", runs, node="node2", user="root")
    try:
        words = ["submit", "digits.yaml", "name=unseen", "--cluster", "slurm", *SMALL, "slurm.nodelist=node2"]
        done = login.type(*words, "--wait")
    finally:
        cluster.run("umount", runs, node="node2", user="root")

    assert done.returncode == 1
    assert "wrote nothing to the run's directory. Most often a node cannot read" in done.stderr
    assert login.status("unseen")["state"] == "failed"
