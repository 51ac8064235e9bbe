"""Where the time of each attempt goes, and goodput as the sum of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ending, Next
from ddp_hpc.run.run_dir.records import Progress
from ddp_hpc.run.run_dir.timeline import Mark
from ddp_hpc.watch.attempt_times import AttemptTime, attempt_times, read_times
from ddp_hpc.watch.goodput import goodput_of
from ddp_hpc.watch.report.attempt_rows import rows_of
from tests.made_run import made_attempt
from tests.report.made import Plan, large_run, made_run

PROGRESS = Progress(attempt=0, step=10, at=150.0)


def attempt(number: int = 0, started_at: float = 100.0, **more: Any) -> Attempt:
    given: dict[str, Any] = {"ending": Ending.FINISHED, "ended_at": started_at + 100.0, **more}
    return made_attempt(number, job_id="1", started_at=started_at, **given)


def begin(attempt: int = 0, at: float = 120.0, step: int = 0) -> Mark:
    return Mark(kind="begin", attempt=attempt, at=at, step=step, world_size=4, num_gpus=4)


def phases(attempt: int = 0, at: float = 190.0, step: int = 70, *, waited_s: float = 0.0, since: int = 0) -> Mark:
    return Mark(
        kind="phases", attempt=attempt, at=at, step=step, num_steps=step - since, phases={"checkpoint": waited_s}
    )


def times(
    attempts: Sequence[Attempt],
    marks: Sequence[Mark],
    *,
    progress: Progress | None = PROGRESS,
    now: float | None = None,
) -> list[AttemptTime]:
    return attempt_times(attempts, marks, progress=progress, queued=None, now=now)


def test_steps_that_were_logged_before_a_kill_count_as_reached_and_are_lost() -> None:
    killed = attempt(ending=Ending.FAILED, cause=Cause.WORKER_CRASHED, next=Next.IN_PLACE, last_step=50)
    marks = [begin(), phases(at=180.0, step=50), begin(1, 220.0, 50), phases(1, 290.0, 100, since=50)]
    logged = [(181.0 + step - 50, step) for step in range(51, 60)] + [(230.0, 51), (280.0, 99), (110.0, 70)]

    first, second = attempt_times(
        [killed, attempt(1, 210.0)], marks, progress=None, queued=None, now=None, logged=logged
    )

    assert (first.reached_step, first.kept_step, second.reached_step) == (59, 50, 100)
    assert goodput_of([first, second]).steps_repeated == 9
    assert spent(first) == {"starting": 20.0, "training": 60.0, "lost": 20.0}


def test_an_attempt_that_was_killed_with_its_supervisor_ends_with_the_line_that_it_logged_last() -> None:
    (one,) = attempt_times(
        [attempt(ending=None, ended_at=None)], [begin()], progress=None, queued=None, now=None, logged=[(170.0, 40)]
    )

    assert (one.ended_at, one.reached_step) == (170.0, 40)


def test_the_newest_logged_steps_are_read_from_both_files(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=349), Plan(first=300, reached=400, ending="finished")])
    run.timeline.write_text(
        "".join(line + "\n" for line in run.timeline.read_text().splitlines() if '"step": 349' not in line)
    )

    first, second = read_times(run, now=0.0, is_alive=False)

    assert (first.reached_step, first.kept_step, second.reached_step) == (340, 300, 400)


def spent(time: AttemptTime) -> dict[str, float]:
    return {kind: round(seconds, 6) for kind, seconds in time.seconds.items() if seconds}


def test_a_finished_attempt_starts_trains_and_saves() -> None:
    (one,) = times([attempt()], [begin(), phases(waited_s=5.0)])

    assert spent(one) == {"starting": 20.0, "training": 75.0, "saving": 5.0}


def test_what_a_later_attempt_repeats_is_lost() -> None:
    crashed = attempt(ending=Ending.FAILED, cause=Cause.WORKER_CRASHED, next=Next.IN_PLACE, last_step=50)
    marks = [
        begin(),
        phases(at=170.0, step=50),
        phases(at=190.0, step=70),
        begin(1, at=220.0, step=50),
        phases(1, at=290.0, step=100, since=50),
    ]

    first, second = times([crashed, attempt(1, started_at=210.0)], marks)

    assert spent(first) == {"starting": 20.0, "training": 50.0, "lost": 30.0}
    assert (first.kept_step, first.reached_step) == (50, 70)
    assert spent(second) == {"starting": 10.0, "training": 90.0}


def test_steps_that_only_a_later_attempt_than_the_next_repeats_are_lost_too() -> None:
    """The newest checkpoint was damaged, or was made after ranks differed: the third attempt goes back further than the second."""
    crashed = attempt(ending=Ending.FAILED, next=Next.IN_PLACE, last_step=90)
    again = attempt(1, 200.0, ending=Ending.FAILED, ended_at=230.0, next=Next.IN_PLACE, first_step=90, last_step=90)
    marks = [begin(at=100.0), phases(at=200.0, step=100)]
    marks += [begin(1, at=200.0, step=90), phases(1, at=230.0, step=100, since=90)]
    marks += [begin(2, at=230.0, step=50), phases(2, at=330.0, step=110, since=50)]

    found = times([crashed, again, attempt(2, started_at=230.0, first_step=50)], marks)

    assert [(one.first_step, one.reached_step, one.kept_step) for one in found] == [
        (0, 100, 50),
        (90, 100, 90),
        (50, 110, 110),
    ]
    assert [spent(one) for one in found] == [{"training": 50.0, "lost": 50.0}, {"lost": 30.0}, {"training": 100.0}]
    assert goodput_of(found).steps_repeated == 60
    rows, _ = rows_of(found, marks)
    assert [row["steps"] for row in rows] == ["0 to 100, kept to 50", "90 to 100, none kept", "50 to 110"]


def test_a_checkpoint_after_the_newest_note_is_kept() -> None:
    """After a week, notes are an hour apart, and saves are not."""
    crashed = attempt(ending=Ending.FAILED, next=Next.IN_PLACE, last_step=60, ended_at=190.0)
    save = Mark(kind="save", attempt=0, at=182.0, step=60, seconds=2.0)

    first, _ = times([crashed, attempt(1, 200.0)], [begin(), phases(at=130.0, step=10), save, begin(1, 210.0, 60)])

    assert (first.reached_step, first.kept_step) == (60, 60)
    assert spent(first) == {"starting": 20.0, "training": 60.0, "lost": 10.0}


def test_a_run_that_was_killed_with_its_supervisor_keeps_what_it_has_committed() -> None:
    killed = attempt(ending=None, ended_at=None, last_step=None)
    save = Mark(kind="save", attempt=0, at=210.0, step=90, seconds=0.0)
    died = attempt(1, 300.0, ending=Ending.FAILED, next=Next.NOTHING)

    (alone,) = times([killed], [begin(), save, phases(at=215.0, step=95)])
    first, _ = times([killed, died], [begin(), save, phases(at=215.0, step=95)])

    assert (alone.kept_step, first.kept_step) == (90, 90)
    assert spent(alone) == {"starting": 20.0, "training": 90.0, "lost": 5.0}


def test_the_time_of_a_step_between_two_notes_is_interpolated() -> None:
    crashed = attempt(ending=Ending.FAILED, last_step=50)

    (one,) = times([crashed], [begin(), phases(at=220.0, step=100)])

    assert spent(one)["training"] == 50.0


def test_saves_of_lost_steps_are_lost_and_not_saving() -> None:
    crashed = attempt(ending=Ending.FAILED, last_step=50)
    marks = [begin(), phases(at=170.0, step=50, waited_s=4.0), phases(at=190.0, step=70, waited_s=6.0)]

    (one,) = times([crashed], marks)

    assert spent(one) == {"starting": 20.0, "training": 46.0, "saving": 4.0, "lost": 30.0}


def test_an_attempt_that_fails_before_its_first_step_is_lost_and_one_that_still_starts_is_not() -> None:
    (failed,) = times([attempt(ending=Ending.FAILED)], [], progress=None)
    (going_on,) = times([attempt(ending=None, ended_at=None)], [], progress=None, now=160.0)

    assert spent(failed) == {"lost": 100.0}
    assert spent(going_on) == {"starting": 60.0}
    assert going_on.is_open


def test_without_records_of_its_time_nothing_is_taken_for_known() -> None:
    """A script, and a run of an older version."""
    (one,) = found = times([attempt()], [])

    assert spent(one) == {"unknown": 100.0}
    assert goodput_of(found).goodput is None


def test_a_killed_attempt_ends_with_its_last_sign_of_life() -> None:
    (one,) = times([attempt(ending=None, ended_at=None, last_step=None)], [begin(), phases(at=170.0, step=50)])

    assert one.ended_at == 170.0
    assert not one.is_open
    assert one.is_failure


def test_the_queue_is_counted_from_the_submission_or_from_the_end_before() -> None:
    before = attempt(ending=Ending.STOPPED, next=Next.REQUEUE, queued_at=40.0)

    first, second, third = times(
        [before, attempt(1, started_at=260.0, next=Next.IN_PLACE), attempt(2, started_at=400.0)], [begin()]
    )

    assert first.seconds["queued"] == 60.0
    assert second.seconds["queued"] == 60.0
    assert third.queued_at is None


def test_a_clock_that_goes_back_makes_no_negative_time() -> None:
    (one,) = times([attempt(ended_at=90.0)], [begin(at=80.0), phases(at=70.0, step=5)])

    assert min(one.seconds.values()) >= 0.0


@pytest.mark.parametrize("ending", ["failed", "stopped", "finished", None])
def test_all_kinds_add_up_to_the_length_of_each_attempt(ending: str | None, tmp_path: Path) -> None:
    run = made_run(
        tmp_path / "run", [Plan(first=0, reached=250), Plan(first=200, reached=330, ending=ending, queued_s=50)]
    )

    found = read_times(run, now=0.0, is_alive=False)

    for one in found:
        assert sum(one.seconds.values()) - one.seconds["queued"] == pytest.approx(one.length_s)


def test_goodput_counts_all_nodes_and_gpus_and_leaves_the_queue_out(tmp_path: Path) -> None:
    run = large_run(tmp_path / "large")

    found = read_times(run, now=0.0, is_alive=False)
    goodput = goodput_of(found)

    running_s = sum(one.length_s for one in found)
    assert sum(value for kind, value in goodput.node_hours.items() if kind != "queued") == pytest.approx(
        running_s * 8 / 3600
    )
    assert goodput.node_hours["queued"] == pytest.approx(sum(120 + 30 * number for number in range(10)) * 8 / 3600)
    assert goodput.gpu_hours == pytest.approx(running_s * 64 / 3600)
    assert goodput.steps_repeated == 4 * 40
    assert goodput.goodput is not None
    assert 0.6 < goodput.goodput < 0.8


def test_the_times_of_many_attempts_read_each_a_few_times() -> None:
    class Counted(list[Attempt]):
        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            self.num_read += len(range(*index.indices(len(self)))) if isinstance(index, slice) else 1
            return super().__getitem__(index)

    attempts = Counted(
        attempt(number, 100.0 * number, ending=Ending.FAILED, cause=Cause.WORKER_CRASHED, next=Next.IN_PLACE)
        for number in range(500)
    )
    marks = [begin(number, 100.0 * number + 1, number) for number in range(500)]

    found = times(attempts, marks)

    assert attempts.num_read <= 4 * len(attempts)
    assert [one.kept_step for one in found[:-1]] == [*range(499)]
