"""Log lines as they are, and as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.failed_worker_log import last_lines, log_of
from ddp_hpc.watch.logs import LogSelection, follow_lines, read_lines
from tests.made_run import add_failure, add_log, make_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Return a run of two attempts and two ranks, with a console."""
    run = make_run(tmp_path)
    for attempt in (0, 1):
        for rank in (0, 1):
            add_log(run, f"attempt {attempt} of rank {rank}\nbye\n", attempt=attempt, rank=rank)
    run.console.write_text("hello\n")
    return run


@pytest.mark.parametrize(
    ("choice", "lines"),
    [
        (LogSelection(), ["hello"]),
        (LogSelection(attempt=1), ["attempt 1 of rank 0", "bye"]),
        (LogSelection(rank=1, attempt=0), ["attempt 0 of rank 1", "bye"]),
        (
            LogSelection(rank=1),
            ["==> attempt 0 <==", "attempt 0 of rank 1", "bye", "==> attempt 1 <==", "attempt 1 of rank 1", "bye"],
        ),
        (
            LogSelection(all_ranks=True, attempt=1),
            ["[rank 0] attempt 1 of rank 0", "[rank 0] bye", "[rank 1] attempt 1 of rank 1", "[rank 1] bye"],
        ),
    ],
)
def test_lines_are_those_of_the_chosen_files(choice: LogSelection, lines: list[str], run: RunDir) -> None:
    assert list(read_lines(run, choice)) == lines


def test_ranks_and_attempts_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for number in (10, 9):
        add_log(run, f"{number}\n", attempt=number)

    assert list(read_lines(run, LogSelection(rank=0))) == ["==> attempt 9 <==", "9", "==> attempt 10 <==", "10"]


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (LogSelection(attempt=7), r"Attempt 7 of run 'digits' has no logs. Attempts with logs: 0, 1"),
        (LogSelection(rank=5), r"Rank 5 of run 'digits' has no log. Ranks: 0, 1"),
    ],
)
def test_a_log_that_is_not_there_is_told_with_those_that_are(choice: LogSelection, told: str, run: RunDir) -> None:
    with pytest.raises(ConfigError, match=told):
        list(read_lines(run, choice))


def test_a_run_without_logs_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no logs yet"):
        list(read_lines(make_run(tmp_path), LogSelection()))


def test_what_is_no_text_is_shown_as_well_as_can_be(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_log(run, "").write_bytes(b"\xff tail")

    assert list(read_lines(run, LogSelection(attempt=0))) == ["\ufffd tail"]


def script(*acts: Callable[[], object]) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Return an `is_over` and a `pause` that let one act happen in each pause, and end when none is left."""
    rest: Iterator[Callable[[], object]] = iter(acts)
    left = [len(acts)]

    def pause() -> None:
        next(rest)()
        left[0] -= 1

    return lambda: left[0] == 0, pause


def test_lines_are_followed_over_files_as_they_come(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    is_over, pause = script(
        lambda: add_log(run, "a\nb"),
        lambda: add_log(run, "c\nd\n"),
        lambda: add_log(run, "x\n", attempt=1),
        lambda: add_log(run, "without an end", attempt=1),
    )

    lines = list(follow_lines(run, LogSelection(rank=0), is_over=is_over, pause=pause))

    assert lines == ["==> attempt 0 <==", "a", "bc", "d", "==> attempt 1 <==", "x", "without an end"]


def test_ranks_are_followed_together(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    is_over, pause = script(
        lambda: add_log(run, "one\n", rank=0),
        lambda: add_log(run, "two\n", rank=1),
        lambda: add_log(run, "three\n", rank=0),
    )

    lines = list(follow_lines(run, LogSelection(all_ranks=True, attempt=0), is_over=is_over, pause=pause))

    assert lines == ["[rank 0] one", "[rank 1] two", "[rank 0] three"]


def test_a_console_that_was_deleted_is_not_one_that_does_not_exist_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(ConfigError, match="no logs yet"):
        next(read_lines(run, LogSelection()))
    add_log(run, "one\n", rank=0)

    with pytest.raises(ConfigError, match=r"console\.log does not exist any more.*--rank 0"):
        next(read_lines(run, LogSelection()))


def test_the_last_lines_of_a_log_leave_out_what_is_blank(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = add_log(run, "x" * 20_000 + "".join(f"\nline {number}" for number in range(9)) + "\n\n")

    assert last_lines(path, 3) == ["line 6", "line 7", "line 8"]


def test_a_failures_log_is_found_where_the_run_has_moved(tmp_path: Path) -> None:
    run = make_run(tmp_path / "old")
    failure = add_failure(run)
    assert log_of(run, failure) is None
    add_log(run, "bye\n")

    (tmp_path / "old").rename(tmp_path / "new")

    moved = RunDir(tmp_path / "new/digits")
    assert log_of(moved, failure) == moved.rank_log(0, 0)
