"""How often to save: the optimum, its limits, the expected cost, and the expected time between failures."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from ddp_hpc.run.checkpoints.save_interval import (
    FIRST_SAVE_AFTER_S,
    DecidedBy,
    SaveCosts,
    SaveInterval,
    best_interval_s,
    between_failures_s,
    choose_interval,
    duration_text,
    is_worth_changing,
)
from ddp_hpc.run.spec import CheckpointSpec

HOUR, DAY = 3600.0, 86_400.0
KEYS = CheckpointSpec(min_interval_s=60, max_interval_s=3600)


def costs(**more: float) -> SaveCosts:
    return SaveCosts(**{"stall_s": 2.0, "between_failures_s": 8 * HOUR, "write_s": 10.0, "restart_s": 60.0, **more})


# --- the cost ---


@pytest.mark.parametrize("stall_s", [0.01, 1.0, 30.0, 200.0])
@pytest.mark.parametrize("mean_s", [100.0, 10_000.0, 1e6])
def test_no_interval_is_expected_to_cost_noticeably_less_than_the_best(stall_s: float, mean_s: float) -> None:
    one = costs(stall_s=stall_s, between_failures_s=mean_s)
    best = best_interval_s(stall_s, mean_s)

    least = min(one.cost_share(best * 1.1**power) for power in range(-40, 41))

    assert one.cost_share(best) - least <= 0.002 * (1 - least) + 0.003 * least


def test_the_expected_cost_is_what_independent_failures_take() -> None:
    """By counting: a million seconds of attempts that fail at random, with saves that are committed some time later."""
    source, one = random.Random(5), costs(between_failures_s=600.0, restart_s=30.0, write_s=20.0, stall_s=3.0)
    all_s = kept_s = 0.0
    for _ in range(20_000):
        life = source.expovariate(1 / one.between_failures_s)
        commits = max(0, math.floor((life - one.restart_s - one.write_s) / (70.0 + one.stall_s)))
        all_s, kept_s = all_s + life, kept_s + 70.0 * commits

    assert 1 - kept_s / all_s == pytest.approx(one.cost_share(70.0), abs=0.01)


def test_saves_that_never_fit_between_two_failures_cost_everything() -> None:
    assert costs(between_failures_s=1.0).cost_share(1e6) == 1.0


# --- the choice ---


@pytest.mark.parametrize(
    ("known", "more", "chosen"),
    [
        ({}, {}, (best_interval_s(2.0, 8 * HOUR), "least cost")),
        ({"stall_s": 0.001}, {}, (60, "shortest")),
        ({"between_failures_s": 1000 * DAY}, {}, (3600, "longest")),
        ({"write_s": 300.0}, {}, (600.0, "written")),
        ({"write_s": 3000.0}, {}, (6000.0, "written")),  # no limit makes a disk faster
        ({}, {"is_measured": False}, (FIRST_SAVE_AFTER_S, "least cost")),
    ],
)
def test_the_interval_is_the_best_one_within_its_limits(
    known: dict[str, float], more: dict[str, float], chosen: tuple[float, DecidedBy]
) -> None:
    assert choose_interval(costs(**known), KEYS, **more) == chosen  # type: ignore[arg-type]  # of several types


def test_a_long_stall_does_not_hold_back_the_save_that_measures_it() -> None:
    keys = CheckpointSpec(min_interval_s=300, max_interval_s=3600)

    assert choose_interval(costs(), keys, is_measured=False)[0] == 300


@pytest.mark.parametrize(
    ("now", "best", "changes"), [(100, 110, False), (100, 75, True), (100, 140, True), (1, 1, False)]
)
def test_an_interval_stays_until_another_is_clearly_better(now: float, best: float, changes: bool) -> None:
    assert is_worth_changing(now, best) is changes


# --- how often a run fails ---


def test_a_run_that_has_not_failed_yet_is_expected_to_go_on_the_longer_the_longer_it_has_trained() -> None:
    times = [between_failures_s(num_failures=0, trained_s=trained) for trained in (0, 60, 3600, DAY, 9 * DAY)]

    assert all(before < after for before, after in pairwise(times))
    assert times[0] < HOUR  # it may have an error that ends it soon
    assert times[-1] == pytest.approx(9 * DAY, rel=0.01)


@pytest.mark.parametrize("mean_s", [HOUR, 8 * HOUR])
def test_after_several_failures_the_runs_own_rate_rules(mean_s: float) -> None:
    assert between_failures_s(num_failures=8, trained_s=8 * mean_s) == pytest.approx(mean_s, rel=0.12)


def test_one_early_failure_is_believed_at_once() -> None:
    assert between_failures_s(num_failures=1, trained_s=60.0) < between_failures_s(num_failures=0, trained_s=60.0) / 1.9


@pytest.mark.parametrize(("failures", "trained_s"), [(0, 1e12), (8, 0.0), (3, -5.0)])
def test_odd_records_have_an_answer_too(failures: int, trained_s: float) -> None:
    found = between_failures_s(num_failures=failures, trained_s=trained_s)

    assert math.isfinite(found)
    assert found > 0


# --- the texts ---


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (0.04, "40 ms"),
        (1.24, "1.2 s"),
        (59.0, "59 s"),
        (540, "9 min"),
        (11.4 * HOUR, "11 h"),
        (154 * DAY, "154 d"),
    ],
)
def test_durations_are_rough(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_the_reason_names_the_numbers_and_the_limit() -> None:
    one = SaveInterval(
        every_steps=340,
        seconds=540.0,
        costs=costs(stall_s=1.2, restart_s=40.0, between_failures_s=11 * HOUR),
        num_failures=2,
        expected_cost=0.01,
    )

    assert one.interval_text() == "every 340 steps (about 9 min)"
    assert one.reason_text("shortest") == (
        "a save stops training for 1.2 s, a start takes 40 s, one failure every 11 h is expected (2 so far); not more often, because of "
        "`checkpoint.min_interval_s`"
    )
