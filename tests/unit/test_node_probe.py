"""Which nodes cannot start a worker, where attempts end and no process says why."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.cluster.containers import BARE
from ddp_hpc.job.ending import node_probe
from ddp_hpc.job.ending.attempt_end import Conclusion, conclude_attempt
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Ledger, record_start
from tests.unit.made_job import CRASHED, NODES, Make

STOPPED_EARLY = Outcome(code=exit_codes.STOPPED_BEFORE_START, step_code=128 + 15)
"""What is left where one task cannot start, and srun ends the others before they listen."""


@pytest.mark.parametrize(
    ("outcome", "mute"), [(CRASHED, ("worker crashed", "in place")), (STOPPED_EARLY, ("unexplained", "requeue"))]
)
@pytest.mark.parametrize(
    ("unable", "blamed"), [(["node2"], ("node2",)), (["node1", "node2"], ()), ([], ())], ids=["one", "all", "none"]
)
def test_nodes_that_cannot_start_a_worker_are_blamed_where_nobody_says_why_twice(
    supervised: Make, unable: list[str], blamed: tuple[str, ...], outcome: Outcome, mute: tuple[str, str]
) -> None:
    one = supervised()
    broken = " | ".join(f"*--nodelist={node}*" for node in unable or ["nowhere"])
    one.slurm.has("srun", f'case "$*" in {broken}) exit 1;; esac\nshift 9; exec "$@"')
    (one.run.path / "python").write_text("#!/bin/sh\necho a greeting of the site\necho ddp-hpc-can-start\n")
    (one.run.path / "python").chmod(0o755)
    wrapper = replace(BARE, python=str(one.run.path / "python"))
    context = replace(one.context, wrapper=wrapper)

    def fails() -> Conclusion:
        attempt = one.begin()
        return conclude_attempt(one.context, attempt, node_probe.explain_by_nodes(context, attempt, outcome))

    fails()
    concluded = fails()

    first, second = Ledger.read(one.run).attempts
    assert (first.cause, first.next, first.failed_nodes) == (*mute, ())
    assert (second.cause, second.next) == ("node failed" if blamed else mute[0], "requeue")
    assert second.failed_nodes == concluded.exclude == blamed
    assert (
        "node2 cannot start a worker's Python and import its modules; the 1 other nodes can" in second.reason
    ) is bool(blamed)


def test_nodes_are_not_asked_where_the_job_was_told_to_leave(supervised: Make) -> None:
    one = supervised()
    one.slurm.has("srun", "exit 1")
    told = replace(STOPPED_EARLY, was_signalled=True)
    for attempt in (one.begin(), one.begin()):
        conclude_attempt(one.context, attempt, node_probe.explain_by_nodes(one.context, attempt, told))

    assert one.slurm.orders("srun") == []
    assert "a stop signal arrived before the workers had installed their signal handlers" in one.last.reason


def test_nodes_are_not_asked_where_the_jobs_time_would_be_over_before_they_answer(supervised: Make) -> None:
    one = supervised()
    one.slurm.has("srun", "exit 1")
    for _ in range(2):
        attempt = ownership.next_attempt(one.run)
        ownership.claim_run(one.run, attempt)
        ends_at = time.time() + 60
        record_start(one.run, attempt=attempt, job_id="7", cluster="slurm", nodes=NODES, ends_at=ends_at)
        conclude_attempt(one.context, attempt, node_probe.explain_by_nodes(one.context, attempt, CRASHED))

    assert one.slurm.orders("srun") == []
