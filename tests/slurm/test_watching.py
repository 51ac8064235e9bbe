"""Waiting, running and ended jobs, told by whoever knows best and asked as seldom as that allows."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.cluster import USER, Cluster
from tests.slurm.runs import SMALL, TRIAL, TRIAL_RECIPE, LoginNode, world


def counting(login: LoginNode, command: str) -> tuple[dict[str, str], Path]:
    """Return an environment in which each call of a command of Slurm's adds a line to a file, and that file."""
    folder, calls = login.folder / "counting", login.folder / "calls"
    folder.mkdir(mode=0o755)
    shim = folder / command
    shim.write_text(f'#!/bin/sh\necho "$*" >> {calls}\nexec /usr/bin/{command} "$@"\n')
    shim.chmod(0o755)
    calls.touch()
    calls.chmod(0o666)
    return {"PATH": f"{folder}:/usr/bin:/bin"}, calls


def test_a_waiting_job_says_why_in_words_and_when_it_may_start(cluster: Cluster, login: LoginNode) -> None:
    blocker = ["--nodes=4", "--exclusive", "--time=10", "--wrap", "sleep 600"]
    cluster.run("sbatch", "--output=/dev/null", *blocker)
    login.submit("digits", *SMALL, *world(2, 1), "resources.time_limit_min=5")

    def reasoned() -> bool:
        cluster.run("rm", "-rf", ".cache", cwd=Path("/home") / USER)  # as if half a minute had gone by
        seen = login.status("digits")
        # Where a busy controller does not answer squeue, scontrol is asked about this job; squeue is again a moment later.
        return bool(seen["reason"]) and seen["source"] == "squeue"

    cluster.wait_for(reasoned, 60)
    status = login.status("digits")
    screen = login.type("status", "digits").stdout

    assert (status["state"], status["slurm_state"], status["source"]) == ("waiting", "PENDING", "squeue")
    assert "state       waiting" in screen
    assert "nodes" in status["reason"] or "jobs" in status["reason"]
    assert status["age_s"] < 30


@pytest.mark.long
def test_many_questions_about_many_waiting_jobs_cost_one_squeue(cluster: Cluster, login: LoginNode) -> None:
    for number in range(4):
        login.queue(f"run-{number}")
    environ, calls = counting(login, "squeue")
    cluster.run("rm", "-rf", ".cache", cwd=Path("/home") / USER)

    for number in range(4):
        assert login.type("status", f"run-{number}", env=environ).returncode == 0
    listed = login.type("list", "--json", env=environ)

    assert {one["state"] for one in json.loads(listed.stdout)} == {"waiting"}
    assert calls.read_text().count("\n") == 1


@pytest.mark.long
def test_a_running_job_is_read_from_its_directory_alone(cluster: Cluster, login: LoginNode) -> None:
    login.add_recipe(TRIAL_RECIPE)
    login.submit(
        "digits", *TRIAL, "recipe.args.load_s=0.001", "train.epochs=400", *world(2, 1), "resources.time_limit_min=30"
    )
    running = login.await_state("digits", "running")
    environ, calls = counting(login, "squeue")

    status = json.loads(login.type("status", "digits", "--json", env=environ).stdout)
    screen = login.type("status", "digits", env=environ).stdout

    assert calls.read_text() == ""
    assert (status["state"], status["source"], status["attempt"]) == ("running", "run directory", 0)
    assert status["job_id"] == running["job_id"]
    assert f"job {status['job_id']} on node" in screen
    assert "time limit  ends the job in" in screen


@pytest.mark.long
def test_a_run_is_named_by_its_job_and_its_logs_are_followed_to_the_end(cluster: Cluster, login: LoginNode) -> None:
    login.submit("digits", *SMALL, *world(2, 1))
    job = login.status("digits")["job_id"]

    followed = login.type("logs", job, "-f")
    all_ranks = login.type("logs", job, "--all").stdout

    assert followed.returncode == 0, followed.stderr
    assert "checkpoint of step 12 committed" in followed.stdout
    assert {line[:8] for line in all_ranks.splitlines() if line.startswith("[rank")} == {"[rank 0]", "[rank 1]"}


@pytest.mark.long
def test_following_a_queued_run_shows_it_wait_and_train(login: LoginNode) -> None:
    said = login.submit("digits", *SMALL, *world(2, 1), "slurm.extra.begin=now+20", "--follow")

    assert "waiting" in said
    assert "digits finished: step 12 of 12" in said


def test_a_waiting_job_is_cancelled_and_can_be_submitted_again(cluster: Cluster, login: LoginNode) -> None:
    login.queue("digits")
    twice = login.queue("digits")

    cancelled = login.type("cancel", "digits")
    left = cluster.run("squeue", "--noheader").stdout
    status = login.status("digits")

    assert "waits in Slurm's queue already" in twice
    assert cancelled.returncode == 0, cancelled.stderr
    assert left == ""
    assert (status["state"], status["reason"]) == ("cancelled", "cancelled by the user while it waited")
    assert "job" in login.queue("digits")


@pytest.mark.long
def test_the_python_interface_submits_waits_and_returns_the_last_evaluation(cluster: Cluster, login: LoginNode) -> None:
    code = (
        "import ddp_hpc\n"
        "spec = ddp_hpc.RunSpec(name='api', train=ddp_hpc.TrainSpec(epochs=1, max_steps=12, global_batch_size=48),\n"
        "    resources=ddp_hpc.ResourcesSpec(nodes=2))\n"
        "job = ddp_hpc.submit(spec, cluster='slurm')\n"
        "print(job.job_id.isdecimal(), job.wait(), sorted(job.result()))\n"
    )

    done = cluster.run(sys.executable, "-c", code, cwd=login.folder, timeout=240)

    assert done.stdout == "True finished ['accuracy', 'loss']\n"


@pytest.mark.long
def test_a_cancelled_job_stays_cancelled_whatever_its_processes_say_on_their_way_out(
    cluster: Cluster, login: LoginNode
) -> None:
    login.submit("digits", "train.epochs=400", *world(2, 1))
    login.await_state("digits", "running")

    assert login.type("cancel", "digits").returncode == 0
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 90)

    assert login.status("digits")["state"] == "cancelled"


@pytest.mark.long
def test_a_job_that_plain_sbatch_submitted_is_known_once_it_begins(cluster: Cluster, login: LoginNode) -> None:
    assert login.type("render", "digits.yaml", "name=plain", "train.epochs=400", *world(2, 1)).returncode == 0
    before = login.status("plain")["state"]

    cluster.run("sbatch", login.run("plain").job_script, cwd=login.folder)
    login.await_state("plain", "running")
    cancelled = login.type("cancel", "plain")

    assert before == "prepared"
    assert cancelled.returncode == 0, cancelled.stderr
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 90)


@pytest.mark.long
def test_who_waits_for_a_job_that_an_administrator_holds_is_told_so(cluster: Cluster, login: LoginNode) -> None:
    settings = (*SMALL, *world(1, 1), "slurm.extra.begin=now+1hour")
    login.submit("held", *settings)
    job = login.status("held")["job_id"]
    cluster.run("scontrol", "hold", job, user="root")
    cluster.run("rm", "-rf", ".cache", cwd=Path("/home") / USER)  # as if half a minute had gone by

    words = ("submit", "digits.yaml", "name=held", "--cluster", "slurm", *settings, "--wait")
    waiting = cluster.popen(sys.executable, "-m", "ddp_hpc", *words, cwd=login.folder)
    now = login.type("requeue", "held", "--now")
    time.sleep(20)  # until it has asked Slurm
    cluster.run("scontrol", "release", job, user="root")
    cluster.run("scontrol", "update", f"jobid={job}", "starttime=now")
    _, stderr = waiting.communicate(timeout=120)

    why = "an administrator holds the job; ask your cluster's support"
    assert now.returncode == 1
    assert f"`--now` does not change the reason: {why}" in now.stderr
    assert waiting.returncode == 0, stderr
    assert stderr.count(f"note: job {job} of held waits: {why}") == 1
