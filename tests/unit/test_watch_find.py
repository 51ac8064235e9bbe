"""From a word to a run directory."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ddp_hpc.base.errors import RunNotFoundError
from ddp_hpc.cli.runs import typed_name
from ddp_hpc.run.run_dir.ledger import record_start
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


@pytest.fixture
def _swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a sweep of three points, one of them named by its file, of which the last has not begun."""
    monkeypatch.chdir(tmp_path)
    names = ["000-seed-0", "big", "002-seed-2"]
    begun = [make_run(Path("runs/grid"), name) for name in names[:2]]
    record_start(begun[1], attempt=0, job_id="57_1", cluster="slurm", nodes=["n1"])
    lines = [{"sweep": "grid"}, *({"point": number, "name": name} for number, name in enumerate(names))]
    Path("runs/grid/sweep.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("grid/000-seed-0", "000-seed-0"),
        ("grid/000", "000-seed-0"),
        ("grid/0", "000-seed-0"),
        ("grid/big", "big"),
        ("grid/1", "big"),
        ("runs/grid/001/", "big"),
        ("57_1", "big"),
    ],
)
@pytest.mark.usefixtures("_swept")
def test_a_point_of_a_sweep_is_found_by_its_name_its_number_and_its_job(word: str, name: str) -> None:
    found = find_run(word, Path("runs"))

    assert found.path == Path("runs/grid").absolute() / name
    assert typed_name(found, {}) == f"grid/{name}"


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("grid/7", "The sweep 'grid' has no point '7'. Points there: 000-seed-0, big, 002-seed-2."),
        ("grid/biig", "The sweep 'grid' has no point 'biig'. Points there: big."),
        ("grid/2", "The point '002-seed-2' of the sweep 'grid' has not begun. `ddp-hpc list grid` shows"),
        (
            "grid",
            "'grid' is a sweep of several runs. List them with `ddp-hpc list grid`, and name one by its name or its",
        ),
    ],
)
@pytest.mark.usefixtures("_swept")
def test_a_point_that_is_not_there_is_told_with_those_there_are(word: str, told: str) -> None:
    with pytest.raises(RunNotFoundError, match=re.escape(told)):
        find_run(word, Path("runs"))


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
