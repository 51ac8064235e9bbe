"""What dies under a run, it survives: to the bit, without a zombie, and only as often as makes sense."""

from __future__ import annotations

import re
import sys
import time
from functools import partial

import pytest

from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import (
    FAULTY,
    MAY_LOSE,
    STEPS,
    assert_unbroken,
    attempts,
    await_done,
    await_first_end,
    await_step,
    job_id,
    kill_agents,
    newest_step,
    node_is_down,
    processes_of,
    signal_worker,
    slow_file,
)
from tests.slurm.runs import LoginNode, world


@pytest.mark.campaign
def test_a_lost_node_ends_no_run_that_slurm_may_not_requeue(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)
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
def test_a_controller_that_is_away_while_the_workers_die_costs_one_attempt(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)
    place.submit("patient", *FAULTY, *world(2, 1), f"recipe.args.slow_while={slow}")
    cluster.wait_for(lambda: "training from the beginning" in place.console("patient"), 90)

    cluster.stop_controller()
    # slurmd may drain the node: it cannot end the step without the controller. There are others.
    kill_agents(cluster, attempts(place, "patient")[0].nodes[1], place.run("patient"))
    cluster.wait_for(lambda: "the job waits until Slurm answers" in place.console("patient"), 120)
    cluster.start_controller()
    slow.unlink()
    await_done(place, "patient")

    first, _ = attempts(place, "patient")
    assert first.next in {"in place", "requeue"}  # srun may not notice the death without the controller
    assert_unbroken(place, "patient", world_size=2, may_lose=STEPS)


@pytest.mark.long
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


@pytest.mark.long
def test_a_worker_that_fails_once_is_replaced_in_place(cluster: Cluster, place: LoginNode) -> None:
    once = ("recipe.args.raises_at=100", f"recipe.args.once={place.folder}/raised")

    place.submit("once", *FAULTY, *world(2, 2), *once, "--wait")

    first, second = attempts(place, "once")
    assert (first.cause, first.next, first.failed_nodes) == ("worker crashed", "in place", ())
    assert second.pid == first.pid  # the same supervisor, and so the same job and nodes
    assert second.first_step == first.last_step
    assert_unbroken(place, "once", world_size=4, may_lose=MAY_LOSE)


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    ["agent", pytest.param("srun", marks=pytest.mark.campaign), pytest.param("torchrun", marks=pytest.mark.campaign)],
)
def test_a_killed_supervisor_is_replaced_by_the_shell_of_its_job(
    cluster: Cluster, place: LoginNode, launcher: str
) -> None:
    slow = slow_file(place)
    place.submit("headless", *FAULTY, *world(2, 2), f"recipe.args.slow_while={slow}", f"launcher={launcher}")
    await_step(place, "headless")
    (first,) = attempts(place, "headless")

    cluster.run("kill", "-9", str(first.pid), node=first.nodes[0], user="root")
    cluster.wait_for(lambda: len(attempts(place, "headless")) == 2, 120)
    slow.unlink()
    await_done(place, "headless")

    first, second = attempts(place, "headless")
    assert (first.cause, first.next, first.reason) == (
        "supervisor died",
        "in place",
        "ddp-hpc's supervisor process was killed by signal 9 (SIGKILL)",
    )
    assert (second.job_id, second.restart, second.nodes) == (first.job_id, first.restart, first.nodes)
    assert_unbroken(place, "headless", world_size=4, may_lose=MAY_LOSE)


@pytest.mark.long
def test_a_run_whose_jobs_shell_was_killed_goes_on_when_it_is_submitted_again(
    cluster: Cluster, place: LoginNode
) -> None:
    """The shell is the supervisor's guardian: Slurm ends the job with it, as FAILED."""
    slow = slow_file(place)
    settings = [*FAULTY, *world(2, 1), f"recipe.args.slow_while={slow}"]
    words = ("submit", "digits.yaml", "name=shell", "--cluster", "slurm", *settings, "--wait")
    waiting = cluster.popen(sys.executable, "-m", "ddp_hpc", *words, cwd=place.folder)
    cluster.wait_for(place.run("shell").submission.exists, 60)
    await_step(place, "shell")
    (first,) = attempts(place, "shell")
    job, node = job_id(place, "shell"), first.nodes[0]
    shell = cluster.run("ps", "-o", "ppid=", "-p", str(first.pid), node=node).stdout.strip()
    assert "slurm_script" in cluster.run("ps", "-o", "args=", "-p", shell, node=node).stdout

    cluster.run("kill", "-9", shell, node=node, user="root")
    stdout, stderr = waiting.communicate(timeout=120)
    slow.unlink()
    again = place.type(*words)

    assert waiting.returncode == 1, stdout + stderr + place.console("shell")
    assert f"Job {job} of shell has ended" in stderr
    assert again.returncode == 0, again.stdout + again.stderr + place.console("shell")
    _, second = attempts(place, "shell")
    assert (second.job_id, second.restart) == (job_id(place, "shell"), 0)
    assert_unbroken(place, "shell", world_size=2, may_lose=MAY_LOSE)


@pytest.mark.long
@pytest.mark.parametrize("max_restarts", [1, 0])
def test_torchrun_restarts_a_killed_rank_itself_as_often_as_it_may(
    cluster: Cluster, place: LoginNode, max_restarts: int
) -> None:
    slow = slow_file(place)
    asked = ("launcher=torchrun", f"torchrun.max_restarts={max_restarts}", f"recipe.args.slow_while={slow}")
    place.submit("elastic", *FAULTY, *world(2, 1), *asked)
    await_step(place, "elastic")
    (first,) = attempts(place, "elastic")

    cluster.run(
        "pkill",
        "--signal=KILL",
        "--full",
        f" -u -m ddp_hpc.job.node.task {place.run('elastic').path} ",
        node=first.nodes[1],
        user="root",
    )
    slow.unlink()
    await_done(place, "elastic")

    found = [(one.cause, one.next) for one in attempts(place, "elastic")]
    assert found == ([("finished", "")] if max_restarts else [("worker crashed", "in place"), ("finished", "")])
    logs = [place.run("elastic").rank_log(number, 0).read_text() for number in range(len(found))]
    assert ["resumed at step" in log for log in logs] == ([True] if max_restarts else [False, True])
    assert_unbroken(place, "elastic", world_size=2, may_lose=MAY_LOSE)


@pytest.mark.long
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
    assert "rank 3 on node4, which is stopped (SIGSTOP)" in first.reason
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
    assert "too few of the other nodes take jobs and have what the job asks for" in place.console("picky")
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


@pytest.mark.campaign
def test_nodes_that_are_left_out_are_let_in_again_where_others_are_lost(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)
    asked = ("restart.exclude_after=1", "slurm.exclude=node4", f"recipe.args.slow_while={slow}")
    place.submit("short", *FAULTY, *world(2, 1), *asked)
    await_step(place, "short")
    bad = attempts(place, "short")[0].nodes[1]
    signal_worker(cluster, bad, "9", place.run("short"))
    cluster.wait_for(lambda: len(attempts(place, "short")) == 2, 120)
    await_step(place, "short", newest_step(place, "short") + 10)

    lost = attempts(place, "short")[1].nodes[0]
    cluster.kill(lost)  # with the supervisor, who would have seen to it
    cluster.wait_for(lambda: "to allow those that it needs" in place.status("short")["reason"], 240)
    asked_for = place.type("requeue", "short", "--now")
    slow.unlink()
    await_done(place, "short")
    cluster.boot(lost)

    assert asked_for.returncode == 0, asked_for.stderr
    assert set(attempts(place, "short")[2].nodes) == {"node1", "node2", "node3"} - {lost}
    assert bad != lost
    assert_unbroken(place, "short", world_size=2, may_lose=STEPS)


def excluded_nodes(cluster: Cluster, job: str) -> str:
    """Return which nodes a job is not to get."""
    shown = cluster.run("scontrol", "show", "job", job).stdout
    return next(word for word in shown.split() if word.startswith("ExcNodeList=")).removeprefix("ExcNodeList=(null)")


@pytest.mark.long
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


@pytest.mark.long
def test_a_lost_node_that_is_set_down_in_the_second_of_the_requeue_costs_no_run(
    cluster: Cluster, place: LoginNode
) -> None:
    slow = slow_file(place)
    cluster.reconfig(SlurmdTimeout="300")  # so Slurm notes nothing by itself
    asked = (f"recipe.args.slow_while={slow}", "checkpoint.every_steps=2", "slurm.nodelist=node[1-2]")
    place.submit("second", *FAULTY, *world(2, 1), *asked)
    await_step(place, "second", 2)

    cluster.kill("node2")
    slow.unlink()
    await_first_end(place, "second")
    time.sleep(0.4)  # node1 would have ended its part by now, if the supervisor did not stay
    cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=lost", user="root")
    cluster.boot("node2")
    cluster.run("scontrol", "update", "nodename=node2", "state=resume", user="root")
    await_done(place, "second", timeout_s=60)

    first, second = attempts(place, "second")
    assert (first.cause, first.next, second.first_step) == ("node failed", "requeue", first.last_step)


@pytest.mark.long
def test_an_attempt_that_slurm_believes_dead_writes_nothing_any_more(cluster: Cluster, place: LoginNode) -> None:
    slow = slow_file(place)  # else it would have finished before Slurm gives it up
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
    assert "a newer start of the run has replaced this one" in place.console("owned").lower()
    made_by = [
        checkpoint_store.read_manifest(checkpoint_names.checkpoint_path(place.run("owned"), step)).made["attempt"]
        for step in checkpoint_names.committed_steps(place.run("owned"))
    ]
    assert made_by == [1, 1]
    assert_unbroken(place, "owned", world_size=2, may_lose=10)


@pytest.mark.long
def test_nothing_of_a_job_is_left_on_any_node(cluster: Cluster, place: LoginNode) -> None:
    place.submit("left", *FAULTY, *world(2, 2), "data.num_workers=1", "--wait")

    def found() -> list[str]:
        return [processes_of(cluster, node, place.run("left")) for node in cluster.settings.hostnames]

    cluster.wait_for(lambda: not any(found()), 60)  # the batch script, too, has to end
