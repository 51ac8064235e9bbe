"""A rank under a stand-in for nsys on the cluster, by each launcher: it trains to the same bits, and comes back after a stop."""

from __future__ import annotations

import json

import pytest

from tests.fake_nsys import on_path
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import FAULTY, attempts, await_done, job_id, newest_step, slow_file
from tests.slurm.runs import LoginNode, world

LAUNCHERS = ("agent", "srun", "torchrun")


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_is_preempted_while_nsys_records_commits_and_ends_with_the_same_bits(
    launcher: str, cluster: Cluster, place: LoginNode
) -> None:
    slow = slow_file(place)
    folder = place.folder / "nsys"
    folder.mkdir()
    folder.chmod(0o777)
    nsys = {"PATH": on_path(folder), "FAKE_NSYS": "between", "FAKE_NSYS_CALLS": str(folder / "calls")}
    args = json.dumps({"slow_while": str(slow)})
    asked = [*FAULTY, f"recipe.args={args}", "checkpoint.every_steps=1", *world(2, 1), f"launcher={launcher}"]
    steps = ["profile.kind=nsys", "profile.steps=[2,9999]", "profile.ranks=[0,1]"]
    place.submit("plain", *asked)
    place.submit("recorded", *asked, *steps, *(f"env.{name}={value}" for name, value in nsys.items()))
    cluster.wait_for(lambda: newest_step(place, "recorded") >= 3, 240)

    # Without an agent, the signal of a step ends at nsys.
    cluster.run("scancel", *([] if launcher == "agent" else ["--batch"]), "--signal=USR2", job_id(place, "recorded"))
    cluster.wait_for(lambda: attempts(place, "recorded")[0].ended_at is not None, 120)
    slow.unlink()
    await_done(place, "plain")
    await_done(place, "recorded")

    assert attempts(place, "recorded")[0].ending == "stopped"
    assert place.digest("recorded") == place.digest("plain")
    assert "attempt-0.rank-1.nsys-rep" in (folder / "calls").read_text()
