"""What another interval between checkpoints would have cost."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.goodput import CheckpointCost, checkpoint_cost
from tests.report.made import STEP_S, Plan, made_run


def cost(**more: float) -> CheckpointCost:
    known = {
        "every_steps": 100,
        "step_s": 1.0,
        "stall_s": 5.0,
        "restart_s": 60.0,
        "num_failures": 2,
        "running_s": 86_400.0,
    }
    return CheckpointCost(**{**known, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("stall_s", [0.1, 1.0, 10.0, 60.0])
@pytest.mark.parametrize("num_failures", [0, 1, 24])
def test_no_interval_is_expected_to_cost_noticeably_less_than_the_best(stall_s: float, num_failures: int) -> None:
    one = cost(stall_s=stall_s, num_failures=num_failures, step_s=0.5)

    least = min(one.share(steps) for steps in range(1, 20_000, 7))

    assert one.share(one.best_every_steps) <= least + 0.002


def test_the_best_interval_is_that_of_young_where_a_save_is_short() -> None:
    one = cost(stall_s=0.01, step_s=0.01)

    young_s = math.sqrt(2 * 0.01 * 43_200)

    assert one.best_every_steps * 0.01 == pytest.approx(young_s, rel=0.01)


def test_saves_that_take_longer_than_the_time_between_failures_have_an_answer_too() -> None:
    assert cost(stall_s=1000.0, running_s=100.0, num_failures=10).best_every_steps >= 1


def test_stall_step_and_restart_are_measured(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=340), Plan(first=300, reached=500, ending="finished")])

    found = checkpoint_cost(read_times(run, now=0.0, is_alive=False), 100)

    assert found is not None
    assert found.stall_s == pytest.approx(0.5)
    assert found.restart_s == pytest.approx(40.0)
    assert found.step_s == pytest.approx(STEP_S, rel=0.2)
    assert found.num_failures == 1


def test_a_hang_is_not_taken_for_slow_steps(tmp_path: Path) -> None:
    plans = [Plan(first=0, reached=350), Plan(first=300, reached=500, ending="finished")]
    times = read_times(made_run(tmp_path / "run", plans), now=0.0, is_alive=False)
    hung = [replace(times[0], ended_at=times[0].ended_at + 3600.0), times[1]]

    calm, found = checkpoint_cost(times, 100), checkpoint_cost(hung, 100)

    assert calm is not None
    assert found is not None
    assert found.step_s == calm.step_s == pytest.approx(STEP_S)
    assert found.best_every_steps > calm.best_every_steps  # failures are further apart


def test_attempts_of_no_length_have_no_cost(tmp_path: Path) -> None:
    """The clock of the supervisor's host went back."""
    times = read_times(made_run(tmp_path / "run", [Plan(first=0, reached=300)]), now=0.0, is_alive=False)
    empty = [replace(one, ended_at=one.attempt.started_at) for one in times]

    assert checkpoint_cost(empty, 100) is None


@pytest.mark.parametrize("every", [None, 0])
def test_without_periodic_saves_nothing_is_said(every: int | None, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=50, ending="finished")])

    assert checkpoint_cost(read_times(run, now=0.0, is_alive=False), every) is None
