"""Pipelines that the authors had not in mind: steps called like sections, one step, outputs and names that two steps share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cli import main

LIKE_SECTIONS = """
name: odd
steps:
  data: {after: slurm, train: {init_from: "{script.run_dir}"}}
  script: &one {script: {command: [python, step.py, "{script.run_dir}"]}, resources: {workers_per_node: 1}}
  steps: {<<: *one, after: [script]}
  slurm: {<<: *one, after: steps, runs_dir: elsewhere}
  train: {after: data, script: {command: [python, step.py, "{slurm.run_dir}", "${HOME}", "{data}", "{train.run}"]}}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "it costs $5"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("step.py").write_text("import pathlib, sys\npathlib.Path(sys.argv[1]).write_text(sys.argv[2])\n")


def planned(capsys: pytest.CaptureFixture[str], text: str, *words: str) -> dict[str, dict[str, Any]]:
    """Return what a dry run says of each step: the value of each key."""
    Path("pipeline.yaml").write_text(text)
    assert main(["submit", "pipeline.yaml", "--cluster", "local", "--dry-run", "--json", *words]) == 0
    records = json.loads(capsys.readouterr().out)
    return {one["step"]: {key: each["value"] for key, each in one["config"].items()} for one in records}


def test_steps_are_called_like_sections_keys_and_steps_and_their_directory_has_a_dollar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("steps.train.seed=4", "steps.steps.train.lr=0.5", "train.epochs=7", "--steps.script.script.start=exec")

    steps = planned(capsys, LIKE_SECTIONS, *words)

    here = Path.cwd()
    assert list(steps) == ["script", "steps", "slurm", "data", "train"]
    assert (steps["train"]["seed"], steps["steps"]["train.lr"], steps["script"]["script.start"]) == (4, 0.5, "exec")
    assert {one["train.epochs"] for one in steps.values()} == {7}
    assert steps["data"]["train.init_from"] == f"{here}/runs/odd-script"
    assert steps["steps"]["script.command"][2:] == [f"{here}/runs/odd-script"]
    assert steps["train"]["script.command"][2:] == [f"{here}/elsewhere/odd-slurm", "${HOME}", "{data}", "odd-train"]


def test_a_pipeline_of_one_step_runs_and_two_steps_may_write_one_file_in_their_order(
    capsys: pytest.CaptureFixture[str],
) -> None:
    head = "resources: {workers_per_node: 1}\nscript: {start: exec}\n"
    Path("one.yaml").write_text(f"{head}steps: {{only: {{script: {{command: [python, step.py, out, first]}}}}}}\n")
    both = "{a: {script: {command: [python, step.py, out, a]}}, b: {after: a, script: {command: [python, step.py, out, b]}}}"
    Path("two.yaml").write_text(f"name: '1'\n{head}steps: {both}\n")

    assert main(["submit", "one.yaml", "--cluster", "local", "--wait"]) == 0
    assert Path("out").read_text() == "first"
    assert main(["submit", "two.yaml", "--cluster", "local", "--wait"]) == 0

    assert Path("out").read_text() == "b"
    assert sorted(path.name for path in Path("runs").iterdir()) == ["1-a", "1-b", "one-only"]
    assert "one-only finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: p\nsteps: {a: {name: mine}, b: {name: mine}}", "`steps.a.name` is set"),
        ("steps: {Übung: {}}", "has a step 'Übung', but a step's name"),
        (f"name: {'n' * 128}\nsteps: {{a: {{}}}}", "use at most 128 letters"),
        ("name: null\nsteps: {a: {}}", "`name` is None"),
        ("steps: {a: {seed: 1}, a: {seed: 2}}", "the key 'a' is already set"),
        ("steps: {no: {}, off: {after: on}}", "Steps: no, off."),
    ],
)
def test_names_that_no_step_can_have_are_refused(text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("pipeline.yaml").write_text(f"{text}\n", encoding="utf-8")

    assert main(["submit", "pipeline.yaml", "--cluster", "local", "--wait"]) == 2

    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_command_for_one_run_names_the_one_that_takes_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pipeline.yaml").write_text("steps: {a: {seed: 1}}\n")

    assert main(["render", "pipeline.yaml"]) == 2

    assert "only `ddp-hpc submit CONFIG` takes" in capsys.readouterr().err
