"""Sites whose Slurm counts no GPUs, whose nodes are unlike, whose modules take Slurm away; what plain sbatch says of a job."""

from __future__ import annotations

import pytest

from ddp_hpc.run.run_dir.records import read_queued_job
from tests.slurm.faulty_runs import (
    FAULTY,
    attempts,
    await_done,
    await_step,
    newest_step,
    node_is_down,
    signal_worker,
    slow_file,
)
from tests.slurm.runs import LoginNode, world

pytestmark = pytest.mark.long

OUTER = {"SLURM_GPUS": "9", "SLURM_GPUS_PER_NODE": "9", "SLURM_GPUS_PER_TASK": "9"}


def test_an_outer_jobs_gpus_and_a_purge_of_slurms_commands_do_not_end_a_run(place: LoginNode) -> None:
    place.submit("purged", *FAULTY, *world(2, 1), 'slurm.setup=["PATH=/nowhere"]')
    place.cluster.cancel_all()

    place.cluster.run("sbatch", place.run("purged").job_script, cwd=place.folder, env=OUTER)
    await_done(place, "purged")

    assert attempts(place, "purged")[-1].ending == "finished", place.console("purged")


def test_a_successor_stays_where_plain_sbatch_put_the_job(place: LoginNode) -> None:
    slow = f"recipe.args.slow_while={slow_file(place)}"
    place.submit("placed", *FAULTY, *world(2, 1), slow, "restart.by=successor", "slurm.partition=low")
    place.cluster.cancel_all()
    place.cluster.run("sbatch", "--partition=high", "--time=33", place.run("placed").job_script, cwd=place.folder)
    await_step(place, "placed")
    first = read_queued_job(place.run("placed"))

    assert place.type("requeue", "placed").returncode == 0
    place.cluster.wait_for(lambda: read_queued_job(place.run("placed")) != first, 60)

    now = read_queued_job(place.run("placed"))
    assert now is not None
    said = place.cluster.run("scontrol", "show", "job", now.job_id).stdout
    assert "Partition=high" in said, said
    assert "TimeLimit=00:33:00" in said, said


def test_a_job_for_drained_nodes_of_a_hidden_partition_waits_in_the_queue_and_its_sweep_knows_it(
    place: LoginNode,
) -> None:
    cluster, nodes = place.cluster, "node[1-3]"
    (place.folder / "train.py").write_text("print('trained')\n")
    cluster.run("scontrol", "update", "partitionname=batch", "hidden=yes", user="root")
    cluster.run("scontrol", "update", f"nodename={nodes}", "state=drain", "reason=a disk", user="root")
    try:
        words = (
            "--sweep",
            "seed=0,1",
            "name=hidden",
            "resources.nodes=2",
            "slurm.partition=batch",
            "--",
            "python",
            "train.py",
        )
        sent = place.type("submit", "--cluster", "slurm", *words)
        waiting = place.type("list", "hidden")
        refused = place.type("delete", "hidden", "--yes")
        too_many = place.type(
            "submit",
            "--cluster",
            "slurm",
            "name=huge",
            "resources.nodes=9",
            "slurm.partition=batch",
            "--",
            "python",
            "train.py",
        )
    finally:
        cluster.run("scontrol", "update", f"nodename={nodes}", "state=resume", user="root")
        cluster.run("scontrol", "update", "partitionname=batch", "hidden=no", user="root")

    assert "If it could with nodes that are down or drained, the job waits for them" in sent.stderr, sent.stderr
    assert "waiting" in waiting.stdout, waiting.stdout
    assert refused.returncode != 0, refused.stdout
    assert "`resources.nodes` is 9, but partition batch has 4 nodes" in too_many.stderr, too_many.stderr
    place.cluster.wait_for(lambda: "2 finished" in place.type("list", "hidden").stdout, 90)


def test_a_slurm_that_counts_no_gpus_is_asked_for_none(unlike: LoginNode) -> None:
    code = "import os; print('of', os.environ['LOCAL_WORLD_SIZE'], os.environ.get('CUDA_VISIBLE_DEVICES'))"
    (unlike.folder / "told.py").write_text(f"{code}\n")
    said = {}
    for option in ("gpus-per-node", "gres", "none"):
        settings = ("resources.nodes=2", "resources.gpus_per_node=2", f"slurm.gpu_option={option}")
        words = (f"name={option}", "--cluster", "slurm", "--wait", *settings, "--", "python", "told.py")
        said[option] = unlike.type("submit", *words)

    assert [one.returncode for one in said.values()] == [2, 2, 0], said
    for option in ("gpus-per-node", "gres"):
        assert "Slurm lists 0 GPUs" in said[option].stderr
        assert "`slurm.gpu_option=none`" in said[option].stderr
    assert "of 2 None" in unlike.console("none")  # nothing hides the node's GPUs from its workers


@pytest.mark.parametrize("by", ["requeue", "successor"])
def test_a_bad_node_is_used_again_where_only_unlike_ones_are_left(unlike: LoginNode, by: str) -> None:
    slow = slow_file(unlike)
    asked = ("resources.mem_gb=40", "restart.exclude_after=1", f"restart.by={by}", f"recipe.args.slow_while={slow}")
    unlike.submit("big", *FAULTY, *world(2, 1), *asked)
    await_step(unlike, "big")
    signal_worker(unlike.cluster, "node2", "9", unlike.run("big"))
    unlike.cluster.wait_for(lambda: len(attempts(unlike, "big")) > 1, 60)
    await_step(unlike, "big", newest_step(unlike, "big") + 10)
    assert unlike.type("requeue", "big").returncode == 0  # its next job, too, can do with no other nodes
    slow.unlink()
    await_done(unlike, "big")

    ends = attempts(unlike, "big")
    assert {one.nodes for one in ends} == {("node1", "node2")}
    assert ends[0].failed_nodes == ("node2",)
    assert "too few of the other nodes take jobs and have what the job asks for" in unlike.console("big")


def test_a_dead_node_is_waited_for_where_only_unlike_ones_are_left(unlike: LoginNode) -> None:
    slow = slow_file(unlike)
    asked = ("resources.mem_gb=40", f"recipe.args.slow_while={slow}")
    unlike.submit("big", *FAULTY, *world(2, 1), *asked)
    await_step(unlike, "big")
    unlike.cluster.kill("node2")
    unlike.cluster.wait_for(lambda: node_is_down(unlike.cluster, "node2"), 60)
    unlike.await_state("big", "waiting")
    unlike.cluster.boot("node2")
    slow.unlink()
    await_done(unlike, "big")

    assert attempts(unlike, "big")[-1].nodes == ("node1", "node2")
