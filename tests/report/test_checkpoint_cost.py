"""What another interval between checkpoints would have cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.run.checkpoints.save_interval import SaveCosts, SaveInterval
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.goodput import fixed_interval
from tests.report.made import STEP_S, Plan, made_run


@pytest.mark.parametrize("stall_s", [0.01, 0.1, 1.0, 10.0, 60.0, 1e6])
@pytest.mark.parametrize("num_failures", [1, 24])
def test_no_interval_is_expected_to_cost_noticeably_less_than_the_best(stall_s: float, num_failures: int) -> None:
    costs = SaveCosts(stall_s=stall_s, restart_s=60.0, between_failures_s=86_400.0 / num_failures)
    one = SaveInterval(every_steps=100, seconds=50.0, costs=costs, num_failures=num_failures, expected_cost=0.0)

    steps, cost = one.best

    assert steps >= 1
    assert cost <= min(costs.share(0.5 * steps) for steps in range(1, 20_000, 7)) + 0.002


def test_stall_step_and_restart_are_measured(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=340), Plan(first=300, reached=500, ending="finished")])

    found = fixed_interval(read_times(run, now=0.0, is_alive=False), 100)

    assert found is not None
    assert found.costs.stall_s == pytest.approx(0.5)
    assert found.costs.restart_s == pytest.approx(40.0)
    assert found.seconds == pytest.approx(100 * STEP_S, rel=0.2)
    assert found.num_failures == 1


def test_a_hang_is_not_taken_for_slow_steps(tmp_path: Path) -> None:
    plans = [Plan(first=0, reached=350), Plan(first=300, reached=500, ending="finished")]
    times = read_times(made_run(tmp_path / "run", plans), now=0.0, is_alive=False)
    hung = [replace(times[0], ended_at=times[0].ended_at + 3600.0), times[1]]

    calm, found = fixed_interval(times, 100), fixed_interval(hung, 100)

    assert calm is not None
    assert found is not None
    assert found.seconds == calm.seconds == pytest.approx(100 * STEP_S)
    assert found.best[0] > calm.best[0]  # failures are further apart


def test_attempts_of_no_length_have_no_cost(tmp_path: Path) -> None:
    """The clock of the supervisor's host went back."""
    times = read_times(made_run(tmp_path / "run", [Plan(first=0, reached=300)]), now=0.0, is_alive=False)
    empty = [replace(one, ended_at=one.attempt.started_at) for one in times]

    assert fixed_interval(empty, 100) is None


@pytest.mark.parametrize("every", [None, 0])
def test_without_periodic_saves_nothing_is_said(every: int | None, tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", [Plan(first=0, reached=50, ending="finished")])

    assert fixed_interval(read_times(run, now=0.0, is_alive=False), every) is None
