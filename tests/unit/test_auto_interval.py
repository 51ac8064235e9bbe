"""What rank zero measures, and after how many steps it has the ranks save."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import pytest

from ddp_hpc.cluster.slow_ranks.summary import Phases
from ddp_hpc.run.checkpoints.past_saves import PastSaves
from ddp_hpc.run.spec import CheckpointSpec
from ddp_hpc.train.auto_interval import AutoInterval
from ddp_hpc.train.save_plan import SavePlan


class Training:
    """Steps and saves by a clock of their own."""

    def __init__(self, *, past: PastSaves | None = None, shortest_s: int = 1, longest_s: int = 10**6) -> None:
        self.now = self.waited_s = 0.0
        self.step = 0
        self.seconds = {"forward": 0.0, "checkpoint": 0.0, "evaluation": 0.0}
        self.notes: list[Mapping[str, float]] = []
        self.auto = AutoInterval(
            CheckpointSpec(min_interval_s=shortest_s, max_interval_s=longest_s),
            past or PastSaves(restart_s=7.0),
            phases=lambda: Phases(num_steps=self.step, seconds=dict(self.seconds)),
            note=lambda _, interval: self.notes.append(interval),
            wait_for_device=self.wait,
            clock=lambda: self.now,
        )

    def wait(self) -> None:
        self.now += self.waited_s

    def takes(self, phase: str, seconds: float) -> None:
        self.now += seconds
        self.seconds[phase] += seconds

    def steps(self, count: int, seconds: float = 0.1) -> int:
        """Make steps, with an exchange of the ranks after each; return the newest choice."""
        every = 0
        for _ in range(count):
            self.step += 1
            self.takes("forward", seconds)
            every = self.auto.choose(self.step)
        return every

    def saves(self, stall_s: float, write_s: float | None = 0.0) -> None:
        with self.auto.measure_stall(self.step):
            self.takes("checkpoint", stall_s)
        if write_s is not None:
            self.auto.note_written(write_s)


FAILS_OFTEN = PastSaves(num_failures=8, trained_s=8 * 500.0, restart_s=3.0)
"""One failure in about 500 s: with a stall of 1 s, the best interval is about half a minute."""


def test_nothing_is_chosen_before_the_speed_is_known_and_the_first_step_does_not_count() -> None:
    one = Training()

    assert one.auto.choose(0) == 0
    assert one.steps(1, seconds=300.0) == 0  # it compiles
    assert one.steps(5) == 0
    assert one.steps(10) == pytest.approx(600, abs=30)  # a minute


def test_a_new_run_saves_after_a_minute_and_then_by_what_that_save_took() -> None:
    one = Training(past=FAILS_OFTEN)
    first = one.steps(30)

    one.saves(0.01)
    after = one.steps(1)

    assert first == pytest.approx(310, rel=0.2)  # by an assumed stall of a second
    assert after == pytest.approx(31, rel=0.2)


def test_evaluations_and_saves_do_not_make_steps_slow() -> None:
    one = Training()
    before = one.steps(30)
    one.takes("evaluation", 900.0)
    one.now -= 900.0  # nor is it training in which nothing failed, in this test

    assert one.steps(1) == before


def test_the_first_save_of_an_attempt_counts_only_until_there_is_another() -> None:
    one = Training(past=FAILS_OFTEN)
    one.steps(30)
    one.saves(9.0)
    slow = one.steps(1)

    one.saves(0.09)

    assert one.steps(1) == pytest.approx(slow / 10, rel=0.3)


def test_one_slow_save_changes_nothing_three_do() -> None:
    one = Training(past=FAILS_OFTEN)
    one.steps(30)
    chosen = []
    for stall_s in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 30.0, 1.0, 30.0, 30.0):
        one.saves(stall_s)
        chosen.append(one.steps(1))

    assert len(set(chosen[1:9])) == 1
    assert chosen[9] > 3 * chosen[8]


def test_a_save_is_not_due_while_the_last_is_being_written() -> None:
    one = Training(past=FAILS_OFTEN)
    one.steps(30)
    one.saves(1.0, write_s=None)

    every = [one.steps(10) for _ in range(200)]

    assert all(steps > 10 * (number + 1) for number, steps in enumerate(every) if number > 40)
    one.auto.note_written(200.0)
    assert one.steps(1) == pytest.approx(4000, rel=0.3)


def test_a_save_that_failed_does_not_count_as_written() -> None:
    one = Training(past=FAILS_OFTEN)
    before = one.steps(30)
    one.saves(1.0, write_s=None)
    one.auto.note_written(None)

    assert one.steps(1) == before


def test_the_wait_for_a_device_that_still_computes_is_no_stall() -> None:
    one = Training(past=FAILS_OFTEN)
    one.steps(30)
    one.waited_s = 60.0
    one.saves(0.25)

    one.steps(1)

    assert one.notes[-1]["stall_s"] == 0.25


def test_slower_steps_make_fewer_of_them() -> None:
    one = Training(past=FAILS_OFTEN)
    fast = one.steps(100)

    slow = one.steps(100, seconds=1.0)

    assert slow == pytest.approx(fast / 10, rel=0.35)


@pytest.mark.parametrize("step_s", [0.08, 0.1, 0.128])
def test_limits_hold_where_steps_become_somewhat_slower_or_faster(step_s: float) -> None:
    one = Training(shortest_s=600, longest_s=600)
    one.steps(70)

    assert one.steps(70, seconds=step_s) * step_s == pytest.approx(600.0, rel=0.002)


def test_a_stall_is_noted_as_measured_at_the_first_save_even_if_nothing_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Training(shortest_s=60)
    one.steps(30)
    with caplog.at_level(logging.INFO):
        caplog.clear()  # the first line is there already where an earlier test has set the level
        one.saves(0.003)
        one.saves(0.003)
    one.steps(30)

    assert [(note["is_measured"], note["stall_s"]) for note in one.notes] == [(0.0, 1.0), (1.0, 0.003)]
    assert one.notes[0]["every_steps"] == one.notes[1]["every_steps"]
    assert ["a save stops training for 3 ms" in record.getMessage() for record in caplog.records] == [True]


def test_a_run_that_has_not_failed_is_not_said_to_fail_soon(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Training().steps(30)

    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("no failure so far, one every 30 min is assumed")


def test_a_change_is_logged_and_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    one = Training(past=FAILS_OFTEN)
    with caplog.at_level(logging.INFO):
        one.steps(200)

    (line,) = [record.getMessage() for record in caplog.records]
    assert line == (
        f"the run saves every {one.notes[0]['every_steps']} steps (about 35 s): a save is assumed to stop training for 1.0 s, a start takes 3.0 s, "
        "one failure every 11 min is expected (8 so far)"
    )
    assert len(one.notes) == 1
    assert one.notes[0]["num_failures"] == 8
    assert one.notes[0]["is_measured"] == 0
    assert 0.05 < one.notes[0]["expected_cost"] < 0.2


# --- the plan of all ranks ---

NOT_YET = SavePlan("auto").next_announcement(0)[0]
"""What rank zero announces before it knows how long a step takes."""


@pytest.mark.parametrize(("every", "due"), [(4, [4, 8, 12]), (None, []), ("auto", [])])
def test_a_number_means_its_multiples(every: int | None, due: list[int]) -> None:
    plan = SavePlan(every)
    plan.begin(2)

    assert [step for step in range(3, 14) if plan.is_due(step)] == due


@pytest.mark.parametrize("every", [1, 4, None, "auto"])
def test_the_next_step_is_the_first_that_is_due(every: int | None) -> None:
    plan = SavePlan(every)
    plan.begin(2)
    plan.take_announced(6, False)

    for step in range(2, 8):
        due = [later for later in range(step + 1, 20) if plan.is_due(later)]
        assert plan.next_step(step) == due[0] if due else plan.next_step(step) >= 20


def test_an_announced_number_counts_from_the_newest_save_or_the_resume() -> None:
    plan, saved = SavePlan("auto"), []
    plan.begin(7)
    for step in range(8, 40):
        plan.take_announced(NOT_YET if step < 10 else 5 if step < 20 else 10, False)
        if plan.is_due(step):
            saved.append(step)
            with plan.count_from_save(step):
                pass

    assert saved == [12, 17, 27, 37]


def test_an_early_save_is_one_save_until_rank_zero_announces_again() -> None:
    plan, saved = SavePlan("auto"), []
    for step in range(1, 40):
        if step in (10, 20):
            plan.take_announced({10: 1, 20: 15}[step], False)
        if plan.is_due(step):
            saved.append(step)
            with plan.count_from_save(step):
                pass

    assert saved == [10, 25]


@pytest.mark.parametrize("every", [4, "auto"])
def test_saves_that_fail_for_too_long_lead_to_a_last_try_on_all_ranks(every: int | Literal["auto"]) -> None:
    now = [50.0]
    zero, other = (SavePlan(every, max_failing_s=60, clock=lambda: now[0]) for _ in range(2))

    def exchange(step: int) -> None:
        told = zero.next_announcement(step)
        for plan in (zero, other):
            plan.take_announced(*told)

    zero.note_written(None)
    now[0] = 100.0
    zero.note_written(None)  # the first one counts
    exchange(5)
    assert not zero.is_due(5)
    now[0] = 110.0
    exchange(6)

    assert [plan.next_step(6) for plan in (zero, other)] == [7, 7]
    assert [(plan.is_due(7), plan.is_last_try) for plan in (zero, other)] == [(True, True)] * 2
    for plan in (zero, other):
        with plan.count_from_save(7):
            assert plan.is_last_try
    zero.note_written(0.1)
    exchange(9)
    assert [(plan.is_due(9), plan.is_last_try) for plan in (zero, other)] == [(False, False)] * 2


def test_saves_may_fail_for_ever_where_no_time_is_set() -> None:
    now = [50.0]
    plan = SavePlan(4, clock=lambda: now[0])
    plan.note_written(None)
    now[0] = 1e9

    assert plan.next_announcement(5) == (NOT_YET, False)


def test_a_number_that_is_smaller_than_what_has_passed_means_now() -> None:
    plan = SavePlan("auto")
    plan.take_announced(100, False)
    assert not plan.is_due(50)

    plan.take_announced(10, False)

    assert plan.is_due(50)
