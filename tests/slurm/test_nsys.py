"""A rank under a stand-in for nsys on the cluster, by each launcher: it trains to the same bits, and comes back after a stop."""

from __future__ import annotations

import json

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import FAULTY, attempts, await_done, job_id, newest_step, slow_file
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import LoginNode, world

LAUNCHERS = ("agent", "srun", "torchrun")
NSYS = ROOT / "tests" / "fake_nsys.py"


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_preempted_while_nsys_records_commits_and_ends_with_the_same_bits(
    launcher: str, cluster: Cluster, place: LoginNode
) -> None:
    slow = slow_file(place)
    notes = place.folder / "nsys"
    notes.mkdir()
    notes.chmod(0o777)
    args = json.dumps({"slow_while": str(slow)})
    asked = [*FAULTY, f"recipe.args={args}", "checkpoint.every_steps=1", *world(2, 1), f"launcher={launcher}"]
    steps = ["profile.kind=nsys", f"profile.command={NSYS}", "profile.steps=[2,9999]", "profile.ranks=[1]"]
    place.submit("plain", *asked)
    place.submit("recorded", *asked, *steps, f"env.FAKE_NSYS_FOLDER={notes}")
    cluster.wait_for(lambda: newest_step(place, "recorded") >= 3, 240)

    cluster.run("scancel", "--signal=USR2", job_id(place, "recorded"))
    cluster.wait_for(lambda: attempts(place, "recorded")[0].ended_at is not None, 120)
    slow.unlink()
    await_done(place, "plain")
    await_done(place, "recorded")

    assert attempts(place, "recorded")[0].ending == "stopped"
    assert place.digest("recorded") == place.digest("plain")
    assert place.run("recorded").nsys_reports() != []
