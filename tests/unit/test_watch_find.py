"""From a word to a run directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RunNotFoundError
from ddp_hpc.watch.find import find_run, list_runs, newest_run
from tests.made_run import add_attempt, make_run


@pytest.mark.parametrize(
    "word", ["digits", "runs/digits", "./runs/digits/", "runs/../runs/digits", "{tmp}/runs/digits"]
)
def test_a_run_is_found_by_name_and_by_directory(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs")

    assert find_run(word.format(tmp=tmp_path), Path("runs")) == run


def test_a_run_is_found_from_within_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "runs")
    monkeypatch.chdir(run.path)

    assert find_run(".", Path("runs")) == run


def test_a_name_wins_over_a_directory_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    run = make_run(tmp_path / "runs")

    assert find_run("digits", Path("runs")) == run


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("digit", r"'digit' is neither a run in .* Runs there: digits\."),
        ("digits/checkpoints", r"neither a run"),
        ("xyz", r"Runs there: mnist, digits\."),
    ],
)
def test_a_missing_run_is_told_with_those_there_are(word: str, told: str, tmp_path: Path) -> None:
    for age, name in enumerate(["mnist", "digits"]):
        os.utime(make_run(tmp_path, name).config, (1000 - age, 1000 - age))

    with pytest.raises(RunNotFoundError, match=told):
        find_run(word, tmp_path)


@pytest.mark.parametrize("runs_dir", ["nowhere", "empty", "file"])
def test_where_there_are_no_runs_the_message_says_what_to_do(runs_dir: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()

    assert list_runs(tmp_path / runs_dir) == []
    with pytest.raises(RunNotFoundError, match=r"Submit one"):
        newest_run(tmp_path / runs_dir)
    with pytest.raises(RunNotFoundError, match=r"Submit one"):
        find_run("digits", tmp_path / runs_dir)


def test_the_newest_run_is_the_one_that_began_or_ended_last(tmp_path: Path) -> None:
    old, new = make_run(tmp_path, "old"), make_run(tmp_path, "new")
    add_attempt(old)
    for run in (old, new):
        os.utime(run.config, (1, 1))
    os.utime(old.attempts, (5, 5))

    assert newest_run(tmp_path) == old


def test_what_is_being_made_is_no_run_yet(tmp_path: Path) -> None:
    make_run(tmp_path, ".digits.123.tmp")
    (tmp_path / "notes").mkdir()

    assert list_runs(tmp_path) == []
