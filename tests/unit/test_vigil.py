"""What a supervisor sees: signals, the last minute, and silence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.job.monitor import LAG_BEHIND_WATCHDOG_S, POLL_INTERVAL_S, Monitor

NOW = 1_000_000.0
LEAD_S = 120.0
RESERVE_S = 15.0
HANG_S = 900.0


def monitor(**more: Any) -> Monitor:
    return Monitor(**{"ends_at": None, "lead_s": LEAD_S, "hang_timeout_s": HANG_S, "signs_of_life": (), **more})


def looks(watching: Monitor, moments: Iterable[float]) -> list[tuple[float, str]]:
    """Look at each of these moments; return those at which something was to be done, and what."""
    found = ((moment, watching.next_action(None, moment)) for moment in moments)
    return [(moment, deed) for moment, deed in found if deed]


def every(step_s: float, until_s: float) -> list[float]:
    return [NOW + step_s * number for number in range(int(until_s / step_s) + 1)]


# --- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "deed"),
    [
        (signal.SIGTERM, "stop"),
        (signal.SIGUSR2, "stop"),
        (signal.SIGCHLD, ""),
        (signal.SIGIO, ""),
        (None, ""),
    ],
)
def test_stop_signals_are_passed_on_and_news_of_children_are_not(number: int | None, deed: str) -> None:
    watching = monitor()

    assert watching.next_action(number, NOW) == deed
    assert watching.is_signalled is (deed == "stop")
    assert not watching.is_out_of_time


def test_every_signal_is_passed_on_also_one_that_comes_again() -> None:
    watching = monitor()

    assert [watching.next_action(signal.SIGTERM, NOW + number) for number in range(3)] == ["stop"] * 3


# --- the last minute -------------------------------------------------------------------------------------------------


def told_before(end: float) -> list[tuple[float, str]]:
    """Return what workers that do not leave are told before a job's end."""
    return [(end - LEAD_S, "stop"), (end - RESERVE_S, "end")]


def test_the_deadline_tells_once_and_ends_who_has_not_left_while_the_job_can_still_go_back() -> None:
    watching = monitor(ends_at=NOW + 600)

    told = looks(watching, every(POLL_INTERVAL_S, 800))

    assert told == told_before(NOW + 600)
    assert watching.is_out_of_time
    assert watching.is_cut_short


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, None])
@pytest.mark.parametrize("late_s", [0.0, 10.0])
def test_slurms_own_signal_at_the_limit_does_not_keep_them_from_being_ended(number: int | None, late_s: float) -> None:
    watching = monitor(ends_at=NOW)
    watching.next_action(None, NOW - LEAD_S)

    assert [watching.next_action(number, NOW + late_s), watching.next_action(None, NOW + 20)] == ["end", ""]


@pytest.mark.parametrize(("lead_s", "reserve_s"), [(120, 15), (45, 15), (30, 10), (6, 2), (0, 0)])
def test_of_a_short_warning_a_third_is_kept_for_the_way_back(lead_s: float, reserve_s: float) -> None:
    watching = monitor(ends_at=NOW, lead_s=lead_s)

    told = looks(watching, [NOW - 60 + number / 4 for number in range(300)])

    assert told[-1] == (NOW - reserve_s, "end")


def test_a_job_that_slept_past_its_limit_and_was_given_the_time_back_goes_on() -> None:
    watching = monitor(ends_at=NOW + 600, ask_end=lambda: NOW + 4200, hang_timeout_s=1e6)

    told = looks(watching, [NOW, NOW + 3600, NOW + 3605])

    assert told == []


def test_an_end_that_an_administrator_changes_is_seen_now_and_then_and_noted_once() -> None:
    asked: list[None] = []
    noted: list[float] = []

    def ask_end() -> float | None:
        asked.append(None)
        return None if len(asked) == 1 else NOW + 9000  # the controller is silent at first

    watching = monitor(ends_at=NOW + 5000, ask_end=ask_end, note_end=noted.append, hang_timeout_s=1e6)

    assert looks(watching, every(POLL_INTERVAL_S, 1000)) == []
    assert (len(asked), noted, watching.ends_at) == (3, [NOW + 9000], NOW + 9000)


def test_an_end_that_is_not_known_at_first_is_asked_for() -> None:
    watching = monitor(ends_at=None, ask_end=lambda: NOW + 1000, hang_timeout_s=1e6)

    assert looks(watching, every(POLL_INTERVAL_S, 1200)) == told_before(NOW + 1000)


# --- told too early --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_preempted", [True, False])
def test_what_slurm_said_before_they_could_hear_is_asked_for_once_they_can(is_preempted: bool, tmp_path: Path) -> None:
    asked: list[float] = []

    def ask_preempted() -> bool:
        asked.append(NOW)
        return is_preempted

    first_sign = tmp_path / "rank-0.log"
    watching = monitor(first_sign=first_sign, ask_preempted=ask_preempted)

    before = looks(watching, every(POLL_INTERVAL_S, 60))
    first_sign.touch()
    after = looks(watching, [NOW + 65, NOW + 70, NOW + 75])

    assert (before, after) == ([], [(NOW + 65, "stop")] if is_preempted else [])
    assert len(asked) == 1


def test_workers_that_were_told_already_need_no_question(tmp_path: Path) -> None:
    first_sign = tmp_path / "rank-0.log"
    first_sign.touch()
    watching = monitor(first_sign=first_sign, ask_preempted=lambda: pytest.fail("asked"))

    assert watching.next_action(signal.SIGTERM, NOW) == "stop"
    assert looks(watching, every(POLL_INTERVAL_S, 60)) == []


# --- deadlines that move ---------------------------------------------------------------------------------------------


def test_without_a_limit_there_is_no_last_minute() -> None:
    watching = monitor(signs_of_life=())

    assert looks(watching, every(POLL_INTERVAL_S, HANG_S)) == []
    assert not watching.is_out_of_time


@pytest.mark.parametrize(("late_s", "deed"), [(0.0, "stop"), (50.0, "stop"), (110.0, "end"), (10_000.0, "end")])
def test_a_deadline_that_has_passed_already_tells_at_the_first_look(late_s: float, deed: str) -> None:
    watching = monitor(ends_at=NOW + LEAD_S - late_s)

    assert watching.next_action(None, NOW) == deed


def test_somebody_may_have_given_the_job_more_time() -> None:
    asked: list[float] = []

    def ask_end() -> float:
        asked.append(NOW)
        return NOW + (1200 if len(asked) <= 3 else 1100)  # three times now and then, and before it is time

    watching = monitor(ends_at=NOW + 600, ask_end=ask_end, hang_timeout_s=1e6)

    told = looks(watching, every(POLL_INTERVAL_S, 1200))

    assert told == [(NOW + 1200 - LEAD_S, "stop"), (NOW + 1100 - RESERVE_S, "end")]
    assert len(asked) == 4  # once a deadline, not at every look


@pytest.mark.parametrize("answer", [None, NOW + 600])
def test_where_nobody_has_or_knows_the_deadline_stands(answer: float | None) -> None:
    watching = monitor(ends_at=NOW + 600, ask_end=lambda: answer)

    assert looks(watching, every(POLL_INTERVAL_S, 600)) == told_before(NOW + 600)


def test_a_limit_taken_away_is_known_once_the_old_one_is_near() -> None:
    watching = monitor(ends_at=NOW + 600, ask_end=lambda: NOW + 365 * 86_400, hang_timeout_s=1e6)

    assert looks(watching, every(POLL_INTERVAL_S, 2000)) == []


# --- patience --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends_in_s", "patience_s"),
    [
        (None, POLL_INTERVAL_S),
        (1e9, POLL_INTERVAL_S),
        (LEAD_S + POLL_INTERVAL_S, POLL_INTERVAL_S),
        (LEAD_S + 2, 2.0),
        (LEAD_S, 0.0),
        (0.0, 0.0),
    ],
)
def test_the_next_look_is_soon_and_never_after_the_deadline(ends_in_s: float | None, patience_s: float) -> None:
    watching = monitor(ends_at=None if ends_in_s is None else NOW + ends_in_s)

    assert watching.patience_s(NOW) == patience_s


def test_once_the_deadline_is_told_looks_are_rare_again() -> None:
    watching = monitor(ends_at=NOW)
    watching.next_action(None, NOW)

    assert watching.patience_s(NOW) == POLL_INTERVAL_S


# --- silence ---------------------------------------------------------------------------------------------------------

SILENT_FOR_S = HANG_S + LAG_BEHIND_WATCHDOG_S


def write(path: Path, at: float) -> None:
    path.touch()
    os.utime(path, (at, at))


@pytest.mark.parametrize("has_spoken", [True, False], ids=["fell silent", "never said a word"])
def test_a_silence_ends_the_workers_once_and_later_than_their_own_watchdogs(has_spoken: bool, tmp_path: Path) -> None:
    sign = tmp_path / "progress.json"
    if has_spoken:
        write(sign, NOW - 1e6)  # how old it is does not matter, only that nothing new comes
    watching = monitor(signs_of_life=(sign, tmp_path / "missing"))

    told = looks(watching, every(POLL_INTERVAL_S, 3 * SILENT_FOR_S))

    assert told == [(NOW + SILENT_FOR_S + POLL_INTERVAL_S, "end")]
    assert watching.is_unresponsive


@pytest.mark.parametrize("which", [0, 1])
def test_any_sign_of_life_breaks_the_silence(which: int, tmp_path: Path) -> None:
    signs = (tmp_path / "progress.json", tmp_path / "rank-0.log")
    watching = monitor(signs_of_life=signs)

    told = []
    for moment in every(POLL_INTERVAL_S, 3 * SILENT_FOR_S):
        if (moment - NOW) % (HANG_S / 2) == 0:
            write(signs[which], moment)
        told += looks(watching, [moment])

    assert told == []
    assert not watching.is_unresponsive


def test_a_sign_of_life_that_another_nodes_clock_puts_into_the_past_counts(tmp_path: Path) -> None:
    sign = tmp_path / "progress.json"
    watching = monitor(signs_of_life=(sign,))

    told = []
    for moment in every(POLL_INTERVAL_S, 3 * SILENT_FOR_S):
        if (moment - NOW) % (HANG_S / 2) == 0:
            write(sign, moment - 86_400)
        told += looks(watching, [moment])

    assert told == []


def test_the_hours_in_which_the_machine_slept_are_no_silence(tmp_path: Path) -> None:
    watching = monitor(signs_of_life=(tmp_path / "progress.json",))
    before = every(POLL_INTERVAL_S, 600)
    woken = before[-1] + 8 * 3600

    told = looks(watching, [*before, woken, *(woken + POLL_INTERVAL_S * number for number in range(1, 20))])

    assert told == []


def test_a_clock_that_is_set_back_is_no_silence_and_stops_no_count(tmp_path: Path) -> None:
    watching = monitor(signs_of_life=(tmp_path / "progress.json",))
    before = every(POLL_INTERVAL_S, 600)

    told = looks(watching, [*before, *every(POLL_INTERVAL_S, 600)])

    assert [deed for _, deed in told] == ["end"]


def test_looks_that_come_fast_count_no_faster_than_the_clock(tmp_path: Path) -> None:
    """Every line of an agent and every child's death makes one."""
    watching = monitor(signs_of_life=(tmp_path / "progress.json",))

    assert looks(watching, [NOW + number / 1000 for number in range(5000)]) == []


# --- what only looks like silence ------------------------------------------------------------------------------------


def test_a_sign_that_is_dated_ahead_allows_silence_until_then(tmp_path: Path) -> None:
    sign, until = tmp_path / "rank-0.log", NOW + 1800
    sign.touch()
    os.utime(sign, (until, until))

    told = looks(
        monitor(signs_of_life=(sign,)),
        every(POLL_INTERVAL_S, 1800 + HANG_S + LAG_BEHIND_WATCHDOG_S + 3 * POLL_INTERVAL_S),
    )

    assert [deed for _, deed in told] == ["end"]
    assert told[0][0] >= until + HANG_S + LAG_BEHIND_WATCHDOG_S


@pytest.mark.parametrize(("asleep_s", "is_seen"), [(HANG_S + 1, True), (HANG_S / 2, False)])
def test_a_job_that_was_suspended_for_longer_than_a_hang_is_told_from_one_that_hangs(
    asleep_s: float, *, is_seen: bool
) -> None:
    watching = monitor()

    told = looks(watching, [NOW, NOW + POLL_INTERVAL_S, NOW + POLL_INTERVAL_S + asleep_s])
    woken = NOW + POLL_INTERVAL_S + asleep_s

    assert told == []
    assert watching.was_just_suspended(woken + 10) is is_seen
    assert not watching.was_just_suspended(woken + 10 * LAG_BEHIND_WATCHDOG_S)  # a hang from then on is one
