"""Preempted, out of time, requeued or cancelled, a run loses no step, and comes back if, and only if, it should."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest

from ddp_hpc.cluster.slurm.queries import JobRecord, parse_job
from ddp_hpc.launch.submission.release_hold import changes_to_start
from ddp_hpc.run.run_dir.records import QueuedJob
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import (
    FAULTY,
    STEPS,
    assert_unbroken,
    attempts,
    await_done,
    await_first_end,
    await_step,
    job_id,
    newest_step,
    signal_worker,
    slow_file,
    steps_taken,
)
from tests.slurm.runs import LoginNode, world


@dataclass(frozen=True)
class Preemption:
    """One way in which a site takes nodes away."""

    victim: tuple[str, ...]
    """Settings of the run."""
    rival: tuple[str, ...]
    """Options of the job that goes before."""
    follows: str = "requeue"
    slurm_conf: dict[str, str] = field(default_factory=dict)


PREEMPTIONS = {
    "partition": Preemption(("slurm.partition=low",), ("--partition=high",)),
    "qos": Preemption(("slurm.qos=low",), ("--qos=high",), slurm_conf={"PreemptType": "preempt/qos"}),
    "cancel": Preemption(("slurm.partition=kill",), ("--partition=high",)),
    "cancel, successor": Preemption(
        ("slurm.partition=kill", "restart.by=successor"), ("--partition=high",), follows="successor"
    ),
}


@pytest.mark.parametrize(
    "way", [way if way == "partition" else pytest.param(way, marks=pytest.mark.campaign) for way in PREEMPTIONS]
)
def test_a_preempted_run_loses_no_step(cluster: Cluster, place: LoginNode, way: str) -> None:
    preemption = PREEMPTIONS[way]
    if preemption.slurm_conf:
        cluster.reconfig(**preemption.slurm_conf)
    slow = slow_file(place)
    asked = [*FAULTY, *world(2, 2), *preemption.victim, "slurm.nodelist=node[1-2]"]
    place.submit("low", *asked, f"recipe.args.slow_while={slow}")
    await_step(place, "low")

    rival = ["--nodelist=node[1-2]", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.run("sbatch", *preemption.rival, *rival)
    await_first_end(place, "low")
    slow.unlink()
    await_done(place, "low")

    first, second = attempts(place, "low")
    assert (first.cause, first.next, first.ending) == ("preempted", preemption.follows, "stopped")
    assert (second.job_id == first.job_id) == (preemption.follows == "requeue")
    assert second.first_step == first.last_step
    assert f"resumed at step {first.last_step} of {STEPS}" in place.console("low")
    assert "training from the beginning" in place.console("low")  # appended to, not begun anew
    assert_unbroken(place, "low", world_size=4)


@pytest.mark.long
@pytest.mark.parametrize("partition", ["low", "kill"])
def test_a_run_preempted_without_grace_time_saves_before_kill_wait_is_over(
    cluster: Cluster, place: LoginNode, partition: str
) -> None:
    """SIGTERM comes all the same; SIGKILL follows after KillWait."""
    cluster.reconfig(KillWait="30")
    change = ("scontrol", "update", f"partitionname={partition}")
    cluster.run(*change, "gracetime=0", user="root")
    slow = slow_file(place)
    try:
        asked = [*FAULTY, *world(2, 2), f"slurm.partition={partition}"]
        place.submit("low", *asked, f"recipe.args.slow_while={slow}")
        await_step(place, "low")

        cluster.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        await_first_end(place, "low")
    finally:
        cluster.run(*change, f"gracetime={cluster.settings.grace}", user="root")

    first = attempts(place, "low")[0]
    assert (first.cause, first.ending) == ("preempted", "stopped")
    assert newest_step(place, "low") == first.last_step


@pytest.mark.long
def test_a_run_crosses_its_time_limit_as_often_as_it_must_and_loses_no_step(place: LoginNode) -> None:
    twenty = ("train.max_steps=20", "train.epochs=1", "recipe.args.load_s=0.04", *world(1, 1))  # a second a step
    limits = ("resources.time_limit_min=1", "slurm.signal_lead_s=45")  # time to start, and for some of the steps
    said = place.submit("short", *FAULTY, *twenty, *limits)
    assert "leaves no time to train" in said  # warned: that is hardly more than starting

    await_done(place, "short", timeout_s=340)

    *before, last = attempts(place, "short")
    assert before
    assert {(one.cause, one.next) for one in before} == {("time limit", "requeue")}
    assert last.cause == "finished"
    assert steps_taken(place.run("short")) == dict.fromkeys(range(1, 21), 1)
    whole = place.type("submit", "digits.yaml", "name=whole", "--cluster", "local", "--wait", *FAULTY, *twenty)
    assert whole.returncode == 0, whole.stderr
    assert place.digest("short") == place.digest("whole")


@pytest.mark.long
def test_a_run_stays_as_long_as_an_administrator_lets_it(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)
    limits = ("resources.time_limit_min=2", "slurm.signal_lead_s=20", f"recipe.args.slow_while={slow}")
    place.submit("longer", *FAULTY, *world(2, 1), *limits)
    await_step(place, "longer")
    left_s = place.status("longer")["limit_s"]

    cluster.run("scontrol", "update", f"jobid={job_id(place, 'longer')}", "timelimit=33", user="root")
    cluster.wait_for(lambda: place.status("longer")["limit_s"] > left_s, 130)  # asked again before it would leave
    time.sleep(20)  # past the old limit, of which Slurm would have sent a signal before

    now = place.status("longer")
    assert now["state"] == "running"
    assert 29 * 60 < now["limit_s"] < 32 * 60
    slow.unlink()
    await_done(place, "longer")
    assert [(one.cause, one.restart) for one in attempts(place, "longer")] == [("finished", 0)]


@pytest.mark.campaign
def test_a_run_whose_workers_cannot_leave_before_the_time_limit_comes_back_all_the_same(
    cluster: Cluster, place: LoginNode
) -> None:
    """Slurm requeues no job that its limit has ended."""
    slow = slow_file(place)
    limits = ("resources.time_limit_min=1", "slurm.signal_lead_s=40", f"recipe.args.slow_while={slow}")
    place.submit("late", *FAULTY, *world(2, 1), *limits, "checkpoint.every_steps=2", "slurm.nodelist=node[1-2]")
    await_step(place, "late", 2)

    signal_worker(cluster, "node2", "19", place.run("late"))
    slow.unlink()
    await_done(place, "late", timeout_s=240)

    first = attempts(place, "late")[0]
    assert (first.cause, first.next) == ("time limit", "requeue")
    assert "before the workers had written" in first.reason
    assert_unbroken(place, "late", world_size=2, may_lose=STEPS)


@pytest.mark.campaign
def test_a_run_that_was_asked_to_stop_does_not_go_on_when_slurm_brings_it_back(
    cluster: Cluster, place: LoginNode
) -> None:
    slow = slow_file(place)
    place.submit("enough", *FAULTY, *world(2, 1), f"recipe.args.slow_while={slow}", "slurm.nodelist=node[1-2]")
    place.await_state("enough", "running")
    cluster.wait_for(lambda: "training from the beginning" in place.console("enough"), 60)
    signal_worker(cluster, "node2", "19", place.run("enough"))  # so that it cannot hear

    asked = place.type("stop", "enough")
    assert asked.returncode == 0, asked.stderr
    cluster.run("scontrol", "requeue", job_id(place, "enough"))
    cluster.wait_for(lambda: len(attempts(place, "enough")) == 2 and attempts(place, "enough")[1].ending, 120)

    second = attempts(place, "enough")[1]
    assert (second.ending, second.cause, second.next) == ("stopped", "stop asked", "")
    assert newest_step(place, "enough") == 0
    assert place.status("enough")["state"] == "stopped"


@pytest.mark.long
@pytest.mark.parametrize("when", ["running", "stopping", "requeued"])
def test_a_cancelled_run_never_comes_back(cluster: Cluster, place: LoginNode, when: str) -> None:
    if when == "requeued":
        cluster.reconfig(AuthInfo="cred_expire=120")  # so that the job still waits when it is cancelled
    place.submit("gone", *FAULTY, *world(2, 1), f"recipe.args.slow_while={slow_file(place)}")
    await_step(place, "gone")
    job = job_id(place, "gone")
    if when == "stopping":
        cluster.run("scancel", "--signal=TERM", job)
    if when == "requeued":
        asked = place.type("requeue", "gone")
        assert asked.returncode == 0, asked.stderr
        cluster.wait_for(lambda: attempts(place, "gone")[-1].next == "requeue", 60)
        # The ledger has it before Slurm has: a scancel in between would be overtaken by the supervisor's `scontrol requeue`.
        pending = ("squeue", "--noheader", f"--jobs={job}", "--states=PENDING")
        cluster.wait_for(lambda: cluster.run(*pending).stdout.strip() != "", 60)

    cluster.run("scancel", job)
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 60)

    num_attempts = len(attempts(place, "gone"))
    assert num_attempts == 1
    accounted = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job}", "--format=State"]
    cluster.wait_for(lambda: cluster.run(*accounted).stdout.startswith("CANCELLED"), 60)
    place.await_state("gone", "cancelled")


@pytest.mark.campaign
def test_a_run_that_is_cancelled_while_it_is_preempted_never_comes_back(cluster: Cluster, place: LoginNode) -> None:
    asked = [*FAULTY, *world(2, 1), "slurm.partition=low", "slurm.nodelist=node[1-2]"]
    place.submit("gone", *asked, f"recipe.args.slow_while={slow_file(place)}")
    await_step(place, "gone")
    signal_worker(cluster, "node2", "19", place.run("gone"))  # else it would leave, and be back, at once
    job = job_id(place, "gone")

    rival = ["--nodelist=node[1-2]", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"]
    cluster.run("sbatch", "--partition=high", *rival)
    cluster.wait_for(lambda: record_of(cluster, job).preempted_at, 60)
    cluster.run("scancel", job)
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 60)

    assert [(one.cause, one.next) for one in attempts(place, "gone")] == [("cancelled", "")]
    place.await_state("gone", "cancelled")


@pytest.mark.long
def test_a_requeued_run_that_is_asked_for_now_is_not_held_back(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)
    cluster.reconfig(AuthInfo="cred_expire=120")  # Slurm's default: a requeued job waits as long
    settings = [*FAULTY, *world(1, 1), "checkpoint.every_steps=5", f"recipe.args.slow_while={slow}"]
    words: Sequence[str] = ("submit", "digits.yaml", "name=awaited", "--cluster", "slurm", *settings, "--wait")
    waiting = cluster.popen(sys.executable, "-m", "ddp_hpc", *words, cwd=place.folder)
    cluster.wait_for(place.run("awaited").submission.exists, 60)
    await_step(place, "awaited", 1)

    asked = place.type("requeue", "awaited")
    assert asked.returncode == 0, asked.stderr
    cluster.wait_for(lambda: attempts(place, "awaited")[0].ended_at is not None, 60)
    slow.unlink()  # not before it has stopped: it would finish first
    cluster.wait_for(lambda: '"attempt":1' in place.run("awaited").submission.read_text().replace(" ", ""), 60)
    now = place.type("requeue", "awaited", "--now")
    assert now.returncode == 0, now.stderr
    stdout, stderr = waiting.communicate(timeout=240)

    first, second = attempts(place, "awaited")
    assert waiting.returncode == 0, stdout + stderr
    assert (first.cause, first.next) == ("requeue asked", "requeue")
    assert first.ended_at is not None
    assert second.started_at - first.ended_at < 100  # by itself, Slurm would have held it back for longer
    assert_unbroken(place, "awaited", world_size=1)


@pytest.mark.long
def test_a_requeued_job_that_is_hastened_at_once_begins_every_time(cluster: Cluster, place: LoginNode) -> None:
    """In the very second of its requeue, Slurm would start it, refuse to launch it, and fail it for good."""
    cluster.reconfig(AuthInfo="cred_expire=120")
    options = ["--parsable", "--output=/dev/null", "--nodelist=node1", "--wrap=exec sleep 600"]
    number = cluster.run("sbatch", *options, cwd=place.folder).stdout.strip()
    queued = QueuedJob(job_id=number, attempt=1, at=0.0, since=0)

    job = partial(record_of, cluster, number)

    def is_hastened() -> bool:
        change = changes_to_start(queued, job(), time.time())
        # Slurm refuses it where the job began in between, by itself.
        words = [f"{name}={value}" for name, value in change.items()]
        return (
            bool(change) and cluster.run("scontrol", "update", f"JobId={number}", *words, check=False).returncode == 0
        )

    for restarts in range(1, 4):
        cluster.wait_for(lambda: job().state == "RUNNING", 60)
        cluster.run("scontrol", "requeue", number)
        cluster.wait_for(is_hastened, 30)
        cluster.wait_for(lambda: is_hastened() or job().state in {"RUNNING", "FAILED"}, 60)
        cluster.wait_for(lambda: job().state in {"RUNNING", "FAILED"}, 60)
        assert (job().state, job().restarts) == ("RUNNING", restarts)


def record_of(cluster: Cluster, job: str) -> JobRecord:
    told = parse_job(cluster.run("scontrol", "--oneliner", "show", "job", job).stdout)
    assert told is not None
    return told
