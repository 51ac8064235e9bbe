"""A run as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from ddp_hpc.base import processes
from ddp_hpc.run.run_dir.ledger import End, Ending, record_end
from ddp_hpc.run.run_dir.poll_files import Tail
from ddp_hpc.run.run_dir.records import Progress, metrics_of_line, write_progress
from ddp_hpc.watch.follow import follow
from tests.made_run import add_attempt, add_log, add_metrics, add_progress, make_run

LATER = 4e9
"""A time after every test's start."""


def evaluation(step: int, at: float = LATER) -> dict[str, object]:
    """Return a line of metrics.jsonl."""
    return {"kind": "eval", "step": step, "epoch": 1, "loss": 0.5, "accuracy": 0.9, "at": at + step}


def test_a_run_is_looked_at_until_its_attempt_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run)
    add_metrics(run, [evaluation(1, at=0.0)])  # of an attempt before
    assert processes.take_lock(run.lock) is not None

    def finish() -> None:
        add_metrics(run, [evaluation(30)])
        record_end(run, 0, End(ending=Ending.FINISHED, exit_code=0))

    acts: Iterator[Callable[[], object]] = iter(
        [
            partial(add_progress, run, step=10),
            partial(add_metrics, run, [{"kind": "train", "step": 15, "at": LATER}, evaluation(20), evaluation(21)]),
            finish,
        ]
    )

    def pause(_: object) -> None:
        next(acts)()

    looks = list(follow(run, 0, clock=lambda: LATER, pause=pause))

    assert [look.status.state for look in looks] == ["starting", "running", "running", "finished"]
    assert [[line["step"] for line in look.evaluations] for look in looks] == [[], [], [20, 21], [30]]


def test_following_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run)

    (look,) = follow(run, 0, clock=lambda: LATER, pause=lambda _: None)

    assert look.status.state == "interrupted"


def test_following_goes_on_over_the_attempts_that_follow(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run)
    add_attempt(run, 1)
    assert processes.take_lock(run.lock) is not None

    def pause(_: object) -> None:
        record_end(run, 1, End(ending=Ending.FINISHED, exit_code=0))

    looks = list(follow(run, 0, clock=lambda: LATER, pause=pause))

    assert [look.status.state for look in looks] == ["starting", "finished"]


def test_what_a_scripts_rank_zero_prints_comes_once_over_all_attempts_and_of_a_recipe_nothing(tmp_path: Path) -> None:
    run, recipe = make_run(tmp_path, "script"), make_run(tmp_path, "recipe")
    for each in (run, recipe):
        add_attempt(each)
        add_log(each, "half")
        assert processes.take_lock(each.lock) is not None
    add_progress(recipe)
    write_progress(run, Progress(attempt=0, saves=0, at=LATER))

    def again() -> None:
        add_log(run, " a line\r 10%\r 20%\nlast words")
        add_attempt(run, 1)
        add_log(run, "second\n", attempt=1)

    acts: Iterator[Callable[[], object]] = iter(
        [again, partial(record_end, run, 1, End(ending=Ending.FINISHED, exit_code=0))]
    )

    looks = list(follow(run, 0, clock=lambda: LATER, pause=lambda _: next(acts)()))

    assert [look.printed for look in looks] == [[], [" 20%", "last words", "second"], []]
    assert next(follow(recipe, 0, clock=lambda: LATER, pause=lambda _: None)).printed == []


def test_a_torn_last_line_of_the_metrics_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_metrics(run, [evaluation(20)])
    with run.metrics.open("a") as file:
        file.write('{"kind": "eval", "st')

    (line,) = Tail(run.metrics).new_records()

    assert metrics_of_line(line) == {"loss": 0.5, "accuracy": 0.9}
