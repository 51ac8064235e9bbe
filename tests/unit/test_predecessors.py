"""What a supervisor finds when it begins: attempts without an end, and other jobs that work on the run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddp_hpc.base.exit_codes import FINISHED
from ddp_hpc.job import supervisor
from ddp_hpc.job.ending import stale_attempts
from ddp_hpc.run.run_dir.records import write_done
from tests.unit.made_job import SLURM_IS_AWAY, STOPPED, Make


@pytest.mark.parametrize(
    ("ends", "cause", "failed"),
    [
        (["NODE_FAIL"], "node failed", ("node2",)),
        (["PREEMPTED"], "preempted", ()),
        (["TIMEOUT"], "time limit", ()),
        (["REQUEUED"], "requeue asked", ()),
        (["CANCELLED by 1001"], "cancelled", ()),
        (["RUNNING"], "unexplained", ()),
        ([], "unexplained", ()),
    ],
)
def test_an_attempt_that_died_without_a_word_gets_the_one_that_slurm_has(
    supervised: Make, ends: list[str], cause: str, failed: tuple[str, ...]
) -> None:
    one = supervised()
    one.begin()
    one.slurm.accounts(*ends)
    one.slurm.knows_nodes(node1="idle", node2="down")

    stale_attempts.close_stale_attempt(one.run, one.context.workload, one.job)

    assert (one.last.cause, one.last.ending, one.last.failed_nodes) == (cause, "failed", failed)
    assert one.last.reason.startswith("ddp-hpc's supervisor process ended without recording why")


def test_a_second_start_of_a_job_is_not_taken_for_its_first(supervised: Make) -> None:
    one = supervised()
    one.begin(restart=1)
    one.slurm.accounts("NODE_FAIL", "PREEMPTED")

    stale_attempts.close_stale_attempt(one.run, one.context.workload, one.job)

    assert one.last.cause == "preempted"


def test_an_attempt_that_had_its_word_keeps_it(supervised: Make) -> None:
    one = supervised()
    one.ends(STOPPED)
    before = one.last

    stale_attempts.close_stale_attempt(one.run, one.context.workload, one.job)

    assert one.last == before


def test_an_attempt_whose_supervisor_died_after_the_run_was_done_has_finished(supervised: Make) -> None:
    one = supervised()
    one.begin()
    one.slurm.accounts("NODE_FAIL")
    write_done(one.run, one.context.workload.goal)

    code = supervisor._run_attempts(one.context, [])

    assert code == FINISHED
    assert (one.last.cause, one.last.ending, one.last.next, one.last.is_last) == ("finished", "finished", "", True)


@pytest.mark.parametrize(("state", "is_its"), [("RUNNING", True), ("COMPLETING", True), ("FAILED", False)])
def test_another_job_that_works_on_the_run_is_noticed(supervised: Make, state: str, is_its: bool) -> None:
    one = supervised()
    one.begin()
    one.slurm.knows(state=state)
    other = replace(one.job, allocation=replace(one.job.allocation, job_id="8"))

    assert stale_attempts.is_used_by_other_job(one.last, other) is is_its
    assert not stale_attempts.is_used_by_other_job(one.last, one.job)


def test_where_slurm_does_not_say_no_other_job_is_believed_to_work(supervised: Make) -> None:
    one = supervised()
    one.begin()
    one.slurm.has("scontrol", SLURM_IS_AWAY)
    other = replace(one.job, allocation=replace(one.job.allocation, job_id="8"))

    assert not stale_attempts.is_used_by_other_job(one.last, other)


def test_an_older_job_of_the_same_number_says_nothing(supervised: Make) -> None:
    one = supervised()
    one.begin()
    old = "7|TIMEOUT|2001-01-01T00:00:00|2001-01-01T00:00:09|10|node1|None"
    new = "7|PREEMPTED|2099-01-01T00:00:00|2099-01-01T00:00:09|10|node1|None"
    one.slurm.has("sacct", "\n".join(f"printf '%s\\n' '{row}' | tr '|' '\\037'" for row in (old, new)))

    stale_attempts.close_stale_attempt(one.run, one.context.workload, one.job)

    assert one.last.cause == "preempted"
