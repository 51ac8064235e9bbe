"""A run that was preempted on the cluster, as `ddp-hpc report` and `status --json` tell of it."""

from __future__ import annotations

import pytest

from ddp_hpc.run.run_dir.joined_ranks import read_rendezvous
from tests.report.test_page import Outline
from tests.slurm.cluster import Cluster
from tests.slurm.faulty_runs import FAULTY, attempts, await_done, await_first_end, await_step, slow_file
from tests.slurm.runs import LoginNode, world

RIVAL_S = 5


@pytest.mark.long
def test_a_preempted_run_shows_how_long_it_waited_in_the_queue_its_job_its_nodes_and_where_its_ranks_met(
    cluster: Cluster, place: LoginNode
) -> None:
    slow = slow_file(place)
    asked = [*FAULTY, *world(2, 1), "slurm.partition=low", "slurm.nodelist=node[1-2]", f"recipe.args.slow_while={slow}"]
    place.submit("low", *asked)
    await_step(place, "low")
    rival = ["--partition=high", "--nodelist=node[1-2]", "--exclusive", "--output=/dev/null", f"--wrap=sleep {RIVAL_S}"]
    cluster.run("sbatch", *rival)
    await_first_end(place, "low")
    waiting = place.type("report", "low", "-o", "waiting.html")
    slow.unlink()
    await_done(place, "low")

    status = place.status("low")
    written = place.type("report", "low", "-o", "report.html")

    assert (waiting.returncode, written.returncode) == (0, 0), waiting.stderr + written.stderr
    first, second = attempts(place, "low")
    assert (first.cause, first.job_id, first.nodes) == ("preempted", second.job_id, ("node1", "node2"))
    assert first.queued_at is not None
    assert first.ended_at is not None
    again_at = second.queued_at or first.ended_at
    assert again_at == pytest.approx(first.ended_at, abs=10)
    assert second.started_at - again_at > RIVAL_S / 2
    queued_s = first.started_at - first.queued_at + second.started_at - again_at
    assert status["job_id"] == first.job_id
    assert status["goodput"]["node_hours"]["queued"] == pytest.approx(2 * queued_s / 3600)
    page = Outline((place.folder / "report.html").read_text())
    assert page.texts.count(first.job_id) >= 2  # a row for each attempt; a step may have the same number
    assert page.texts.count("node1, node2") == 2
    assert any(text.startswith("queued ") for text in page.texts)
    for number in (0, 1):
        met = read_rendezvous(place.run("low"), number)
        assert met is not None
        assert met.endpoint in page.texts
        assert met.why in page.text
