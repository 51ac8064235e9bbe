"""A real training, stopped and resumed: its timeline, its report and its screen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import read_marks
from tests.report.test_page import Outline

DIGITS = Path(__file__).parents[2] / "examples" / "digits.yaml"


def ddp_hpc(folder: Path, *words: str) -> str:
    argv = [sys.executable, "-m", "ddp_hpc", *words]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_a_real_run_has_a_timeline_goodput_a_page_and_a_screen(tmp_path: Path) -> None:
    given = ["submit", str(DIGITS), "--wait", "checkpoint.every_steps=10", "eval.every_epochs=1", "recipe.args.width=4"]
    ddp_hpc(tmp_path, *given, "train.epochs=2")
    ddp_hpc(tmp_path, *given, "train.epochs=3")  # goes on where the first one ended

    marks = read_marks(RunDir(tmp_path / "runs" / "digits"))
    goodput = json.loads(ddp_hpc(tmp_path, "status", "digits", "--json"))["goodput"]
    page = Outline((tmp_path / ddp_hpc(tmp_path, "report", "digits").strip()).read_text())
    screen = ddp_hpc(tmp_path, "status", "digits", "--watch")

    assert [(mark.attempt, mark.step, mark.world_size) for mark in marks if mark.kind == "begin"] == [
        (0, 0, 2),
        (1, 30, 2),
    ]
    assert {mark.step for mark in marks if mark.kind == "save"} >= {10, 20, 30, 40, 45}
    assert [mark.step for mark in marks if mark.kind == "evaluation"] == [15, 30, 45]
    assert marks[-1].num_steps == 15
    assert goodput["node_hours"]["training"] > 0
    assert goodput["steps_repeated"] == 0
    assert {"Where the time went", "Loss and throughput", "Where a step's time goes", "Checkpoints", "Notes"} <= {
        *page.headings
    }
    assert "finished  step 45 of 45" in screen
