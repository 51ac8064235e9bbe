"""A user's own script with the lines of `attach`, on two nodes that a higher partition takes away."""

from __future__ import annotations

import shutil

import pytest

from tests.distributed.test_attach import are_equal
from tests.slurm.cluster import USER, Cluster
from tests.slurm.faulty_runs import attempts, await_done, await_first_end
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode, world

EXAMPLE = ROOT / "examples" / "plain_torch.py"


def submit(place: LoginNode, name: str, *settings: str) -> None:
    words = ["submit", "--cluster", "slurm", f"name={name}", *world(2, 1), *settings, "--"]
    done = place.type(*words, "python", EXAMPLE.name, "--epochs", "150")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_preempted_script_is_requeued_once_and_ends_in_the_bits_of_an_undisturbed_one(
    cluster: Cluster, place: LoginNode
) -> None:
    shutil.copy(EXAMPLE, place.folder)
    shutil.chown(place.folder / EXAMPLE.name, USER, USER)
    submit(place, "low", "slurm.partition=low", "slurm.nodelist=node[1-2]")
    checkpoints = place.run("low").checkpoints
    cluster.wait_for(lambda: list(checkpoints.glob("step-????????")), 180)

    cluster.run(
        "sbatch", "--partition=high", "--nodelist=node[1-2]", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    await_first_end(place, "low")
    await_done(place, "low")
    submit(place, "calm")
    await_done(place, "calm")

    first, second = attempts(place, "low")
    assert (first.cause, first.next, first.ending) == ("preempted", "requeue", "stopped")
    assert (second.job_id, second.cause) == (first.job_id, "finished")
    assert f"all of them stop after step {first.last_step}" in place.console("low")
    assert second.first_step == first.last_step
    low, calm = (place.run(name).checkpoints / "step-00002400" for name in ("low", "calm"))
    assert are_equal(low, calm)
