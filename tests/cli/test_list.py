"""`ddp-hpc list`: which runs, in what order, and the keys by which they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.paths import RunDir
from tests.made_run import add_attempt, add_progress, make_run

LISTED = ("list", "--runs-dir", "runs")


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have three runs that differ in two keys, of which one has no evaluation yet, and one whose file is broken."""
    monkeypatch.chdir(tmp_path)
    rows = [("a", 0.1, 64, 0.9, "finished"), ("b", 0.5, 64, 0.7, "stopped"), ("c", 0.1, 128, None, "finished")]
    for name, lr, batch, accuracy, ending in rows:
        run = make_run(tmp_path / "runs", name)
        run.config.write_text(
            f"name: {name}\ntrain: {{lr: {lr}, global_batch_size: {batch}}}\nrecipe.args: {{width: 8}}\n"
        )
        add_attempt(run, ending=ending)
        add_progress(run, metrics={} if accuracy is None else {"accuracy": accuracy})
    make_run(tmp_path / "runs", "odd").config.write_text("no: such key\n")


def names(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*LISTED, *words]) == 0
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_runs_whose_number_is_nan_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    for name, loss in {"a": 0.3, "b": float("nan"), "c": 0.1}.items():
        add_progress(RunDir(Path("runs") / name), loss=loss, metrics={"accuracy": loss})

    assert [names(capsys, "--sort", by) for by in ("loss", "accuracy")] == [["c", "a", "b", "odd"]] * 2
    assert names(capsys, "--sort", "accuracy", "--reverse") == ["a", "c", "b", "odd"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--sort", "name"), ["a", "b", "c", "odd"]),
        (("--sort", "name", "--reverse"), ["odd", "c", "b", "a"]),
        (("--sort", "accuracy"), ["b", "a", "c", "odd"]),
        (("--sort", "accuracy", "--reverse"), ["a", "b", "c", "odd"]),
        (("--sort", "train.lr", "--filter", "state=finished"), ["a", "c"]),
        (("--filter", "train.lr=0.1", "--filter", "train.global_batch_size=128"), ["c"]),
        (("--filter", "recipe.args.width=8", "--sort", "name"), ["a", "b", "c"]),
        (("--filter", "train.max_steps=null", "--sort", "name"), ["a", "b", "c"]),
    ],
)
def test_runs_are_chosen_and_ordered(
    words: tuple[str, ...], found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(capsys, *words)[: len(found)] == found
    if "--filter" in words:
        assert names(capsys, *words) == found


def test_the_keys_that_differ_are_columns_and_those_that_do_not_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LISTED, "--keys", "--sort", "name"]) == 0
    header, a, b, *_, odd = capsys.readouterr().out.splitlines()

    assert header.endswith("train.global_batch_size  train.lr")
    assert (a.split()[-2:], b.split()[-2:], odd.split()[-2:]) == (["64", "0.1"], ["64", "0.5"], ["-", "-"])


def test_json_has_the_same_runs_and_their_differing_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LISTED, "--json", "--keys", "--filter", "train.global_batch_size=64", "--sort", "name"]) == 0

    found = json.loads(capsys.readouterr().out)

    assert [(one["run"], one["differs"]) for one in found] == [("a", {"train.lr": 0.1}), ("b", {"train.lr": 0.5})]


def test_no_run_is_told_by_the_conditions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LISTED, "--filter", "train.lr=7"]) == 0
    assert (
        capsys.readouterr().out
        == "There are no runs with train.lr=7 in 'runs'. List another directory with `--runs-dir DIR`.\n"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--filter", "train.batch_size=1"), "Did you mean `train.global_batch_size`?"),
        (("--filter", "state=dead"), "The states are prepared, waiting, starting, running"),
        (("--filter", "fast"), "Write KEY=VALUE or state=STATE"),
        (("--sort", "beauty"), "Use one of name, state, step, loss, checkpoint, attempt, age, accuracy, or a key"),
    ],
)
def test_what_cannot_be_asked_is_an_error_that_says_what_can(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*LISTED, *words]) == 2
    assert told in capsys.readouterr().err


def test_a_secret_that_differs_is_no_column_to_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        config = tmp_path / "runs" / name / "config.yaml"
        config.write_text(config.read_text() + f"env: {{HF_TOKEN: secret-of-{name}}}\n")

    assert main([*LISTED, "--keys"]) == 0
    assert main([*LISTED, "--keys", "--json"]) == 0

    printed = capsys.readouterr().out
    assert "env.HF_TOKEN" in printed
    assert "secret-of" not in printed


@pytest.mark.parametrize(
    "words", [("--sort", "loss"), ("--filter", "state=finished"), ("--sort", "accuracy", "--json")]
)
def test_a_column_and_a_state_are_compared_without_reading_a_configuration(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("ddp_hpc.watch.compare_runs.load_resolved", read.append)

    assert main([*LISTED, *words]) == 0

    assert "a" in capsys.readouterr().out
    assert read == []
