"""What the records of a run's earlier attempts say of its failures and saves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.run.checkpoints.past_saves import (
    NUM_NEWEST_FAILURES,
    PastAttempt,
    PastSaves,
    make_past_saves,
    read_past_saves,
    summarize_attempts,
)
from ddp_hpc.run.run_dir.ledger import Attempt, Cause
from ddp_hpc.run.run_dir.timeline import Mark
from tests.made_run import made_attempt
from tests.report.made import Plan, made_run

LOST = PastAttempt(is_sudden=True, trained_s=50.0, started_s=5.0)


def attempt(number: int = 0, cause: Cause | None = Cause.WORKER_CRASHED, **more: object) -> Attempt:
    return made_attempt(number, started_at=1000.0, cause=cause, **more)


def marks(number: int = 0, *, first: int = 0, saved: int | None = 60, reached: int = 100) -> list[Mark]:
    found = [Mark(kind="begin", attempt=number, at=1010.0, step=first)]
    if saved is not None:
        found.append(Mark(kind="save", attempt=number, at=1040.0, step=saved, seconds=2.5))
    phases = {"forward": 40.0, "checkpoint": 3.0}
    return [
        *found,
        Mark(kind="phases", attempt=number, at=1060.0, step=reached, num_steps=reached - first, phases=phases),
    ]


def past(*attempts: PastAttempt) -> PastSaves:
    return summarize_attempts(attempts, stalls_s=[], writes_s=[])


@pytest.mark.parametrize("cause", Cause)
def test_only_what_comes_without_warning_counts_as_a_failure(cause: Cause) -> None:
    unasked = {
        "worker crashed",
        "hang",
        "node failed",
        "ranks differ",
        "unexplained",
        "supervisor died",
        "suspended",
        "fenced",
    }

    found = make_past_saves([attempt(cause=cause)], marks(saved=100))

    assert found.num_failures == (cause in unasked)


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.TIME_LIMIT])
def test_a_preemption_that_left_no_time_to_save_counts(cause: Cause) -> None:
    assert make_past_saves([attempt(cause=cause)], marks(saved=60, reached=100)).num_failures == 1


def test_an_attempt_that_died_with_its_supervisor_counts_and_one_that_never_trained_does_not() -> None:
    attempts = [attempt(0, None), attempt(1), attempt(2, Cause.NODE_FAILED)]

    assert make_past_saves(attempts, [*marks(0), *marks(2)]).num_failures == 2


def test_training_is_timed_by_a_clock_that_does_not_jump() -> None:
    jumped = [replace(mark, at=mark.at + 1e8 * (mark.kind == "phases")) for mark in marks()]

    found = make_past_saves([attempt()], jumped)

    assert found.trained_s == 43.0


def test_stalls_that_were_only_assumed_are_not_taken_for_measured() -> None:
    def chosen(is_measured: float) -> Mark:
        return Mark(
            kind="interval",
            attempt=0,
            at=1.0,
            step=1,
            interval={"stall_s": 1.0 + is_measured, "is_measured": is_measured},
        )

    assert make_past_saves([attempt()], [*marks(), chosen(0.0)]).stalls_s == ()
    assert make_past_saves([attempt()], [*marks(), chosen(1.0), chosen(0.0)]).stalls_s == (2.0,)


def test_a_run_of_an_older_version_has_no_past() -> None:
    assert make_past_saves([attempt(), attempt(1)], []) == PastSaves()


def test_what_happened_before_the_newest_failures_is_forgotten() -> None:
    debugging = [replace(LOST, trained_s=1.0)] * 30
    calm = replace(LOST, is_sudden=False, trained_s=1e6)

    found = past(*debugging, calm)

    assert found.num_failures == NUM_NEWEST_FAILURES
    assert found.trained_s == NUM_NEWEST_FAILURES * 1.0 + 1e6


def test_it_is_read_from_a_run_directory_without_the_attempt_that_reads(tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run",
        [Plan(first=0, reached=340), Plan(first=300, reached=500, ending="finished", cause="finished")],
    )

    before, whole = (read_past_saves(run, before=number, now=0.0) for number in (1, 2))

    assert (before.num_failures, whole.num_failures) == (1, 1)
    assert 0 < before.trained_s < whole.trained_s
    assert before.restart_s == pytest.approx(40.0)
    assert before.writes_s == (1.5, 1.5, 1.5)
