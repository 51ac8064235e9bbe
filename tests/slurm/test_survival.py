"""What a cluster does to a run, it survives: to the bit, without a zombie, and only as often as makes sense."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc import checkpoint_store
from ddp_hpc.job.torchrun_node import TELL_AGAIN_S
from ddp_hpc.records import Attempt, QueuedJob, read_attempts
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm.queries import JobRecord, parse_job, update_argv
from ddp_hpc.submission.slurm_executor import hastening
from tests.slurm.cluster import USER, Cluster
from tests.slurm.runs import LoginNode, world

RECIPE = Path(__file__).with_name("faulty_recipe.py")
STEPS = 120
FAULTY = (
    "recipe.target=faulty_recipe:build",
    "recipe.args={}",
    "train.epochs=6",
    "train.global_batch_size=24",
    "train.record_samples=true",
    "resources.cpus_per_worker=1",  # so many threads everywhere: sums are the same to the bit
    "checkpoint.every_steps=10",
    "checkpoint.keep_best=0",
    "log.every_steps=10",
)
"""120 steps of some 25 ms, in six epochs."""
MAY_LOSE = 20
"""Two intervals: a checkpoint may still be under way, until the next one waits for it."""


@pytest.fixture
def place(login: LoginNode) -> LoginNode:
    """Return a login node with the faulty recipe beside the configuration."""
    shutil.copy(RECIPE, login.folder)
    shutil.chown(login.folder / RECIPE.name, USER, USER)
    return login


def attempts(login: LoginNode, name: str) -> list[Attempt]:
    return read_attempts(login.run(name))


def newest_step(login: LoginNode, name: str) -> int:
    return max(checkpoint_store.committed_steps(login.run(name)), default=0)


def slow_file(login: LoginNode) -> Path:
    """Return a file that slows a run down as `recipe.args.slow_while`: until it goes, the run does not finish."""
    path = login.folder / "slow"
    path.touch()
    return path


def job_id(login: LoginNode, name: str) -> str:
    record: dict[str, Any] = json.loads(login.run(name).submission.read_text())
    return str(record["job_id"])


def await_step(login: LoginNode, name: str, step: int = 10) -> None:
    """Return once a run has committed a step."""
    login.cluster.wait_for(lambda: newest_step(login, name) >= step, 180)


def await_first_end(login: LoginNode, name: str) -> None:
    """Return once a run's first attempt has ended."""
    login.cluster.wait_for(lambda: attempts(login, name)[0].ended_at is not None, 120)


def await_done(login: LoginNode, *names: str, timeout_s: float = 240) -> None:
    """Return once runs have finished, and their ledgers say so, which is a moment later."""

    def is_done(name: str) -> bool:
        return login.run(name).done.exists() and attempts(login, name)[-1].ended_at is not None

    try:
        login.cluster.wait_for(lambda: all(map(is_done, names)), timeout_s)
    except AssertionError as error:
        told = [f"--- {name}\n{login.console(name)}" for name in names]
        raise AssertionError("\n".join([str(error), *told])) from error


def steps_taken(run: RunDir) -> Counter[int]:
    """Count how often rank zero took each step, over all attempts."""
    lines = (path.read_text().splitlines() for path in run.samples.glob("attempt-*/rank-0.jsonl"))
    return Counter(json.loads(line)["step"] for part in lines for line in part)


def samples_by_epoch(run: RunDir) -> dict[int, list[int]]:
    """Return the samples of each epoch, of each step as the newest attempt took it."""
    newest: dict[int, tuple[int, int, list[int]]] = {}
    for path in run.samples.glob("attempt-*/rank-*.jsonl"):
        attempt = int(path.parent.name.removeprefix("attempt-"))
        for line in path.read_text().splitlines():
            record = json.loads(line)
            known = newest.get(record["step"])
            if known is None or known[0] < attempt:
                newest[record["step"]] = known = (attempt, record["epoch"], [])
            if known[0] == attempt:
                known[2].extend(record["samples"])
    epochs: dict[int, list[int]] = {}
    for _, epoch, ids in newest.values():
        epochs.setdefault(epoch, []).extend(ids)
    return {epoch: sorted(ids) for epoch, ids in epochs.items()}


_UNBROKEN: dict[int, str] = {}
"""Digests of undisturbed runs by their number of workers, made when they are first needed."""


def unbroken_digest(login: LoginNode, world_size: int) -> str:
    """Return the digest of an undisturbed run, which is the same on one machine (`test_training`)."""
    name = f"unbroken-{world_size}"
    if world_size not in _UNBROKEN:
        words = [
            "submit",
            "digits.yaml",
            f"name={name}",
            "--cluster",
            "local",
            "--wait",
            *FAULTY,
            *world(1, world_size),
        ]
        done = login.type(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        _UNBROKEN[world_size] = login.digest(name)
    return _UNBROKEN[world_size]


def assert_unbroken(login: LoginNode, name: str, *, world_size: int, may_lose: int = 0) -> None:
    """Check that a run came to the bits of an undisturbed one, each sample once, with no more steps taken twice."""
    assert login.digest(name) == unbroken_digest(login, world_size)
    taken = steps_taken(login.run(name))
    assert sum(taken.values()) - STEPS <= may_lose, taken
    assert list(samples_by_epoch(login.run(name)).values()) == [list(range(480))] * 6


def signal_worker(cluster: Cluster, node: str, number: str, run: RunDir) -> None:
    """Send a signal to one worker of a run on a node."""
    code = (
        "import psutil, sys\n"
        "agents = [p for p in psutil.process_iter(['cmdline'])"
        " if 'ddp_hpc.job.agent' in (p.info['cmdline'] or []) and sys.argv[1] in p.info['cmdline']"
        " and 'srun' not in p.info['cmdline'][0]]\n"
        "workers = [child for agent in agents for child in agent.children()]\n"
        "workers[-1].send_signal(int(sys.argv[2]))\n"
    )
    cluster.run(sys.executable, "-c", code, str(run.path), number, node=node, user="root")


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


def test_a_run_crosses_its_time_limit_as_often_as_it_must_and_loses_no_step(place: LoginNode) -> None:
    four = ("train.max_steps=4", "train.epochs=1", "recipe.args.load_s=0.04", *world(1, 1))  # a second a step
    limits = ("resources.time_limit_min=1", "slurm.signal_lead_s=55")  # time for a step or two
    said = place.submit("short", *FAULTY, *four, *limits)
    assert "gets nowhere" in said  # warned: that is hardly more than starting

    await_done(place, "short", timeout_s=340)

    *before, last = attempts(place, "short")
    assert before
    assert {(one.cause, one.next) for one in before} == {("time limit", "requeue")}
    assert last.cause == "finished"
    assert steps_taken(place.run("short")) == {1: 1, 2: 1, 3: 1, 4: 1}
    whole = place.type("submit", "digits.yaml", "name=whole", "--cluster", "local", "--wait", *FAULTY, *four)
    assert whole.returncode == 0, whole.stderr
    assert place.digest("short") == place.digest("whole")


@pytest.mark.campaign
def test_a_run_whose_workers_cannot_leave_before_the_time_limit_comes_back_all_the_same(
    cluster: Cluster, place: LoginNode
) -> None:
    """Slurm requeues no job that its limit has ended."""
    slow = place.folder / "slow"
    slow.touch()
    limits = ("resources.time_limit_min=1", "slurm.signal_lead_s=40", f"recipe.args.slow_while={slow}")
    place.submit("late", *FAULTY, *world(2, 1), *limits, "checkpoint.every_steps=2", "slurm.nodelist=node[1-2]")
    await_step(place, "late", 2)

    signal_worker(cluster, "node2", "19", place.run("late"))
    slow.unlink()
    await_done(place, "late", timeout_s=240)

    first = attempts(place, "late")[0]
    assert (first.cause, first.next) == ("time limit", "requeue")
    assert "before the workers had committed" in first.reason
    assert_unbroken(place, "late", world_size=2, may_lose=STEPS)


@pytest.mark.campaign
def test_a_lost_node_ends_no_run_that_slurm_may_not_requeue(cluster: Cluster, place: LoginNode) -> None:
    slow = place.folder / "slow"
    slow.touch()
    cluster.reconfig(KillWait="20")  # else the supervisor, too, is gone before it knows
    by = ("slurm.requeue=false", "restart.by=successor", f"recipe.args.slow_while={slow}", "checkpoint.every_steps=2")
    place.submit("heir", *FAULTY, *world(2, 1), *by, "slurm.nodelist=node[1-2]")
    await_step(place, "heir", 2)

    cluster.kill("node2")
    cluster.wait_for(partial(node_is_down, cluster, "node2"), 120)
    cluster.boot("node2")
    cluster.wait_for(lambda: attempts(place, "heir")[0].ended_at is not None, 60)
    slow.unlink()
    await_done(place, "heir")

    first, second = attempts(place, "heir")
    assert (first.cause, first.next, first.failed_nodes) == ("node failed", "successor", ("node2",))
    assert second.job_id != first.job_id
    assert_unbroken(place, "heir", world_size=2, may_lose=STEPS)


@pytest.mark.campaign
def test_a_run_that_was_asked_to_stop_does_not_go_on_when_slurm_brings_it_back(
    cluster: Cluster, place: LoginNode
) -> None:
    slow = place.folder / "slow"
    slow.touch()
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


@pytest.mark.campaign
def test_a_controller_that_is_away_while_the_workers_die_costs_one_attempt(cluster: Cluster, place: LoginNode) -> None:
    slow = place.folder / "slow"
    slow.touch()
    place.submit("patient", *FAULTY, *world(2, 1), f"recipe.args.slow_while={slow}")
    cluster.wait_for(lambda: "training from the beginning" in place.console("patient"), 90)

    cluster.stop_controller()
    # slurmd may drain the node: it cannot end the step without the controller. There are others.
    kill_agents(cluster, attempts(place, "patient")[0].nodes[1], place.run("patient"))
    cluster.wait_for(lambda: "waiting for Slurm" in place.console("patient"), 120)
    cluster.start_controller()
    slow.unlink()
    await_done(place, "patient")

    first, _ = attempts(place, "patient")
    assert first.next in {"in place", "requeue"}  # srun may not notice the death without the controller
    assert_unbroken(place, "patient", world_size=2, may_lose=STEPS)


def kill_agents(cluster: Cluster, node: str, run: RunDir) -> None:
    """Kill the agent of a run on a node, and with it its workers."""
    cluster.run(
        "pkill", "--signal=KILL", "--full", f"^\\S*python\\S* -m ddp_hpc.job.agent {run.path} ", node=node, user="root"
    )


LATE = """
import os, sys, time
from pathlib import Path
words = [*sys.orig_argv, "", ""]
if "-m" in words and words[words.index("-m") + 1] in %r:
    late = Path(%r)
    (late / os.environ["SLURM_PROCID"]).touch()
    while (late / "wait").exists():
        time.sleep(0.01)
"""
"""Keeps the interpreters of some modules from starting; Python runs a module `sitecustomize` before anything else."""


def hold_back(place: LoginNode, *modules: str) -> Path:
    """Let no interpreter of these modules start while the file exists that is returned."""
    late, shim = place.folder / "late", place.folder / "sitecustomize.py"
    late.mkdir()
    (late / "wait").touch()
    shim.write_text(LATE % (modules, str(late)))
    for path in (late, late / "wait", shim):
        shutil.chown(path, USER, USER)
    return late / "wait"


def await_held_back(cluster: Cluster, wait: Path, *tasks: str) -> None:
    """Return once an interpreter of each of Slurm's tasks is held back."""
    cluster.wait_for(lambda: {path.name for path in wait.parent.iterdir()} == {*tasks, wait.name}, 60)


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("agent", "USR2"),
        pytest.param("agent", "TERM", marks=pytest.mark.campaign),
        pytest.param("srun", "USR2", marks=pytest.mark.campaign),
        pytest.param("srun", "TERM", marks=pytest.mark.campaign),
        pytest.param("torchrun", "USR2", marks=pytest.mark.campaign),
        pytest.param("torchrun", "TERM", marks=pytest.mark.campaign),
    ],
)
def test_a_run_that_is_told_to_leave_before_it_can_listen_leaves(
    cluster: Cluster, place: LoginNode, launcher: str, number: str
) -> None:
    wait = hold_back(place, "ddp_hpc.job.agent", "ddp_hpc.job.task", "ddp_hpc.job.torchrun_node")
    place.submit("early", *FAULTY, *world(2, 1), f"launcher={launcher}")
    await_held_back(cluster, wait, "0", "1")

    cluster.run("scancel", f"--signal={number}", job_id(place, "early"))
    cluster.wait_for(lambda: attempts(place, "early")[0].ended_at is not None, 60)
    wait.unlink()
    await_done(place, "early")

    first, _ = attempts(place, "early")
    assert (first.cause, first.next, first.ending) == ("unexplained", "requeue", "failed")
    assert first.reason == "told to leave before anybody could listen"
    assert_unbroken(place, "early", world_size=2)


@pytest.mark.campaign
def test_workers_of_torchrun_are_not_told_before_they_can_listen(cluster: Cluster, place: LoginNode) -> None:
    wait = hold_back(place, "ddp_hpc.job.task")
    place.submit("early", *FAULTY, *world(2, 1), "launcher=torchrun")
    await_held_back(cluster, wait, "0", "1")

    cluster.run("scancel", "--signal=USR2", job_id(place, "early"))
    time.sleep(3 * TELL_AGAIN_S)
    wait.unlink()
    await_done(place, "early")

    first, _ = attempts(place, "early")
    assert (first.cause, first.next, first.ending) == ("requeue asked", "requeue", "stopped")
    assert_unbroken(place, "early", world_size=2)


def test_a_job_that_is_told_to_leave_while_it_sets_up_leaves(cluster: Cluster, place: LoginNode) -> None:
    setting_up = place.folder / "setting-up"
    once = f"[[ -e {setting_up} ]] || {{ touch {setting_up}; sleep 3; }}"
    place.submit("early", *FAULTY, *world(2, 1), "slurm.signal_to=batch", f"slurm.setup=[{json.dumps(once)}]")
    cluster.wait_for(setting_up.exists, 60)

    cluster.run("scancel", "--batch", "--signal=USR2", job_id(place, "early"))
    await_done(place, "early")

    first, _ = attempts(place, "early")
    assert (first.cause, first.next, first.ending) == ("requeue asked", "requeue", "stopped")
    assert_unbroken(place, "early", world_size=2)


@pytest.mark.campaign
def test_a_job_outlives_a_signal_that_nobody_can_hear_yet(cluster: Cluster, place: LoginNode) -> None:
    wait = hold_back(place, "ddp_hpc.job.supervisor")
    place.submit("early", *FAULTY, *world(2, 1), "slurm.signal_to=batch")
    await_held_back(cluster, wait, "0")

    cluster.run("scancel", "--batch", "--signal=USR2", job_id(place, "early"))
    time.sleep(2.0)  # nothing tells when it has come
    wait.unlink()
    await_done(place, "early")

    assert [one.cause for one in attempts(place, "early")] == ["finished"]
    assert_unbroken(place, "early", world_size=2)


def test_a_recipe_that_always_fails_ends_after_the_attempts_it_is_allowed(place: LoginNode) -> None:
    always = ("recipe.args.raises_at=100", "restart.max_no_progress=2", "checkpoint.every_steps=1")
    said = place.type(
        "submit", "digits.yaml", "name=always", "--cluster", "slurm", *FAULTY, *world(2, 2), *always, "--wait"
    )

    found = attempts(place, "always")
    assert said.returncode == 1
    assert [one.next for one in found] == ["in place"] * (len(found) - 1) + [""]
    assert {one.job_id for one in found} == {job_id(place, "always")}
    newest = newest_step(place, "always")
    assert newest > 0
    assert [one.first_step for one in found[-2:]] == [newest] * 2
    # How many made progress before is chance: the save of an attempt's last step may be lost with it.
    assert all(one.first_step < newest for one in found[:-2])
    reason = place.status("always")["reason"]
    assert "ValueError: sample 100 is out of luck" in reason
    assert "2 attempts in a row ended without a new checkpoint" in reason
    assert "on node" in reason


def test_a_worker_that_fails_once_is_replaced_in_place(cluster: Cluster, place: LoginNode) -> None:
    once = ("recipe.args.raises_at=100", f"recipe.args.once={place.folder}/raised")

    place.submit("once", *FAULTY, *world(2, 2), *once, "--wait")

    first, second = attempts(place, "once")
    assert (first.cause, first.next, first.failed_nodes) == ("worker crashed", "in place", ())
    assert second.pid == first.pid  # the same supervisor, and so the same job and nodes
    assert second.first_step == first.last_step
    assert_unbroken(place, "once", world_size=4, may_lose=MAY_LOSE)


def test_a_frozen_worker_is_named_and_replaced(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)
    asked = [*FAULTY, *world(2, 2), "restart.hang_timeout_s=20", "slurm.nodelist=node[3-4]"]
    place.submit("frozen", *asked, f"recipe.args.slow_while={slow}")
    await_step(place, "frozen")

    signal_worker(cluster, "node4", "19", place.run("frozen"))
    await_first_end(place, "frozen")
    slow.unlink()
    await_done(place, "frozen")

    first, second = attempts(place, "frozen")
    assert (first.cause, first.next, first.failed_nodes) == ("hang", "in place", ("node4",))
    assert "rank 3 on node4 says nothing" in first.reason
    # The other ranks wait for it: who of them is bitten first may take the connection from the rest.
    assert re.search(r"=== rank [0-2] on node[34]: .+\nTimeout \(", place.run("frozen").stacks(0).read_text())
    assert second.first_step == first.last_step
    assert_unbroken(place, "frozen", world_size=4, may_lose=MAY_LOSE)


@pytest.mark.campaign
def test_bad_nodes_are_left_out_as_far_as_they_can_be_spared(cluster: Cluster, place: LoginNode) -> None:
    place.submit("picky", *FAULTY, *world(3, 1), "restart.exclude_after=1", "slurm.partition=batch")
    bad = []
    for number in (1, 2):
        await_step(place, "picky", 20 * number)
        bad.append(attempts(place, "picky")[-1].nodes[-1])
        signal_worker(cluster, bad[-1], "9", place.run("picky"))
        cluster.wait_for(lambda: len(attempts(place, "picky")) == number + 1, 60)  # noqa: B023

    await_done(place, "picky")

    first, second, third = attempts(place, "picky")
    assert (first.next, second.next) == ("requeue", "requeue")
    assert not {bad[0]} & {*second.nodes}
    assert len({*bad} & {*third.nodes}) == 1  # of four nodes, three are needed
    assert "failed before, but only 2 others are in order" in place.console("picky")
    assert_unbroken(place, "picky", world_size=3, may_lose=2 * MAY_LOSE)


@pytest.mark.campaign
def test_a_node_that_is_needed_is_not_left_out(cluster: Cluster, place: LoginNode) -> None:
    place.submit("all", *FAULTY, *world(4, 1), "restart.exclude_after=1", "slurm.partition=batch")
    await_step(place, "all")
    signal_worker(cluster, "node4", "9", place.run("all"))

    await_done(place, "all")

    assert [(one.cause, one.next) for one in attempts(place, "all")] == [
        ("worker crashed", "requeue"),
        ("finished", ""),
    ]
    assert not excluded_nodes(cluster, job_id(place, "all"))


def excluded_nodes(cluster: Cluster, job: str) -> str:
    """Return which nodes a job is not to get."""
    shown = cluster.run("scontrol", "show", "job", job).stdout
    return next(word for word in shown.split() if word.startswith("ExcNodeList=")).removeprefix("ExcNodeList=(null)")


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

    cluster.run("scancel", job)
    cluster.wait_for(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), 60)

    num_attempts = len(attempts(place, "gone"))
    assert num_attempts == 1
    accounted = ["sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job}", "--format=State"]
    cluster.wait_for(lambda: cluster.run(*accounted).stdout.startswith("CANCELLED"), 60)
    place.await_state("gone", "cancelled")


@pytest.mark.timeout(900)
def test_lost_nodes_cost_no_more_than_a_checkpoint_interval(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)
    place.submit("other", *FAULTY, *world(2, 1), f"recipe.args.slow_while={slow}", "slurm.nodelist=node[1-2]")
    place.submit("batch-host", *FAULTY, *world(1, 1), f"recipe.args.slow_while={slow}", "slurm.nodelist=node3")
    for name in ("other", "batch-host"):
        await_step(place, name)

    cluster.kill("node2")
    cluster.kill("node3")
    slow.unlink()
    for node in ("node2", "node3"):
        cluster.wait_for(partial(node_is_down, cluster, node), 240)
        cluster.boot(node)
    await_done(place, "other", "batch-host")

    for name, node in (("other", "node2"), ("batch-host", "node3")):
        first, second = attempts(place, name)[:2]
        assert second.first_step == first.last_step
        assert (first.cause, first.failed_nodes) == ("node failed", (node,))
        assert first.next in {"slurm", "requeue"}  # Slurm's or ours, whoever is first
    assert_unbroken(place, "other", world_size=2, may_lose=MAY_LOSE)
    assert_unbroken(place, "batch-host", world_size=1, may_lose=MAY_LOSE)


def node_is_down(cluster: Cluster, node: str) -> bool:
    """Ask by scontrol: on Slurm 24.11, sinfo went on for minutes without telling that a node was down (seen twice)."""
    return "State=DOWN" in cluster.run("scontrol", "--oneliner", "show", "node", node).stdout


def test_an_attempt_that_slurm_believes_dead_writes_nothing_any_more(cluster: Cluster, place: LoginNode) -> None:
    slow = place.folder / "slow"  # else it would have finished before Slurm gives it up
    slow.touch()
    every = ("checkpoint.every_steps=2", f"recipe.args.slow_while={slow}")
    place.submit("owned", *FAULTY, *world(1, 2), *every)
    await_step(place, "owned", 2)
    first_node = attempts(place, "owned")[0].nodes[0]

    cluster.cut(first_node)  # its processes go on, and see the run's directory
    cluster.wait_for(lambda: len(attempts(place, "owned")) == 2, 90)
    cluster.wait_for(lambda: attempts(place, "owned")[0].ending == "fenced", 60)
    slow.unlink()
    await_done(place, "owned")

    first, second = attempts(place, "owned")
    assert (first.failed_nodes, second.first_step) == ((first_node,), second.first_step)
    assert "another attempt has taken the run over" in place.console("owned").lower()
    made_by = [
        checkpoint_store.read_manifest(checkpoint_store.checkpoint_path(place.run("owned"), step)).made["attempt"]
        for step in checkpoint_store.committed_steps(place.run("owned"))
    ]
    assert made_by == [1, 1]
    assert_unbroken(place, "owned", world_size=2, may_lose=10)


def test_a_requeued_run_that_somebody_waits_for_is_not_held_back(cluster: Cluster, place: LoginNode) -> None:
    slow = place.folder / "slow"
    slow.touch()
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
    stdout, stderr = waiting.communicate(timeout=240)

    first, second = attempts(place, "awaited")
    assert waiting.returncode == 0, stdout + stderr
    assert (first.cause, first.next) == ("requeue asked", "requeue")
    assert first.ended_at is not None
    assert second.started_at - first.ended_at < 100  # by itself, Slurm would have held it back for longer
    assert_unbroken(place, "awaited", world_size=1)


def test_a_requeued_job_that_is_hastened_at_once_begins_every_time(cluster: Cluster, place: LoginNode) -> None:
    """In the very second of its requeue, Slurm would start it, refuse to launch it, and fail it for good."""
    cluster.reconfig(AuthInfo="cred_expire=120")
    options = ["--parsable", "--output=/dev/null", "--nodelist=node1", "--wrap=exec sleep 600"]
    number = cluster.run("sbatch", *options, cwd=place.folder).stdout.strip()
    queued = QueuedJob(job_id=number, attempt=1, at=0.0, since=0)

    def job() -> JobRecord:
        told = parse_job(cluster.run("scontrol", "--oneliner", "show", "job", number).stdout)
        assert told is not None
        return told

    def is_hastened() -> bool:
        change = hastening(queued, job(), time.time())
        # Slurm refuses it where the job began in between, by itself.
        return bool(change) and cluster.run(*update_argv(number, **change), check=False).returncode == 0

    for restarts in range(1, 4):
        cluster.wait_for(lambda: job().state == "RUNNING", 60)
        cluster.run("scontrol", "requeue", number)
        cluster.wait_for(is_hastened, 30)
        cluster.wait_for(lambda: is_hastened() or job().state in {"RUNNING", "FAILED"}, 60)
        cluster.wait_for(lambda: job().state in {"RUNNING", "FAILED"}, 60)
        assert (job().state, job().restarts) == ("RUNNING", restarts)


def test_nothing_of_a_job_is_left_on_any_node(cluster: Cluster, place: LoginNode) -> None:
    place.submit("left", *FAULTY, *world(2, 2), "data.num_workers=1", "--wait")

    def found() -> list[str]:
        return [processes_of(cluster, node, place.run("left")) for node in cluster.settings.hostnames]

    cluster.wait_for(lambda: not any(found()), 60)  # the batch script, too, has to end


def processes_of(cluster: Cluster, node: str, run: RunDir) -> str:
    """Return the command lines on a node that name a run."""
    listing: subprocess.CompletedProcess[str] = cluster.run(
        "pgrep", "--full", "--list-full", str(run.path), node=node, check=False
    )
    return "".join(line for line in listing.stdout.splitlines(keepends=True) if "pgrep" not in line)
