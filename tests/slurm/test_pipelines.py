"""Pipelines on the cluster: steps that wait for others over a preemption, and steps that can never start."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.run_dir.ledger import Ledger
from ddp_hpc.run_dir.records import read_progress
from tests.slurm.runs import LoginNode

pytestmark = pytest.mark.long

PIPELINE = """
name: digits
resources: {workers_per_node: 1}
steps:
  export:
    after: evaluate
    script: {command: [python, tell.py, "{train.run_dir}", "{export.run_dir}/told"]}
  train:
    slurm: {partition: low, nodelist: node1}
    recipe: {target: image_classification, args: {model: mini_resnet, dataset: digits, width: 8}}
    train: {max_steps: 400, epochs: 100, global_batch_size: 96}
    checkpoint: {every_steps: 20}
  evaluate:
    after: train
    script: {command: [python, tell.py, "{train.run_dir}", "{evaluate.run_dir}/told"]}
"""
FAILS = """
name: bad
resources: {workers_per_node: 1}
restart: {max_no_progress: 1}
steps:
  train: {script: {command: [python, fail.py]}}
  evaluate: {after: train, script: {command: [python, tell.py, "{train.run_dir}", never]}}
  export: {after: evaluate, script: {command: [python, tell.py, "{train.run_dir}", never]}}
  clean: {after: "train:notok", script: {command: [python, tell.py, "{train.run_dir}", "{clean.run_dir}/told"]}}
"""
TELL = """
import pathlib, sys
steps = sorted(path.name for path in pathlib.Path(sys.argv[1], "checkpoints").glob("step-*"))
pathlib.Path(sys.argv[2]).write_text(" ".join(steps))
"""


def add(login: LoginNode, folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    login.add_recipe(folder / name)


def submit(login: LoginNode, file: str) -> dict[str, dict[str, Any]]:
    """Submit a pipeline; return what was said of each step."""
    done = login.type("submit", file, "--cluster", "slurm", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return {one["step"]: one for one in json.loads(done.stdout)}


def test_steps_wait_over_a_preemption_of_the_first_and_follow_it_in_their_order(
    login: LoginNode, tmp_path: Path
) -> None:
    add(login, tmp_path, "pipeline.yaml", PIPELINE)
    add(login, tmp_path, "tell.py", TELL)
    said = submit(login, "pipeline.yaml")
    assert list(said) == ["train", "evaluate", "export"]
    train = login.run("digits-train")
    script = login.run("digits-evaluate").job_script.read_text()
    assert f"#SBATCH --dependency=afterok:{said['train']['job_id']}\n" in script
    assert "#SBATCH --kill-on-invalid-dep=yes\n" in script

    def is_training() -> bool:
        progress = read_progress(train)
        return progress is not None and progress.step >= 40

    login.cluster.wait_for(is_training, 180)
    assert login.status("digits-export")["reason"] == "the job waits until digits-evaluate has finished"
    urgent = ("--partition=high", "--nodelist=node1", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3")
    login.cluster.run("sbatch", *urgent, cwd=login.folder)
    login.await_state("digits-export", "finished", timeout_s=300)

    first, *_, last = Ledger.read(train).attempts
    assert (first.cause, last.ending, last.job_id) == ("preempted", "finished", first.job_id)
    ends = [Ledger.read(login.run(f"digits-{step}")).attempts for step in ("train", "evaluate", "export")]
    for before, after in itertools.pairwise(ends):
        assert len(after) == 1
        assert after[0].started_at >= (before[-1].ended_at or 0.0)
    assert "step-00000400" in (login.run("digits-evaluate").path / "told").read_text()
    again = submit(login, "pipeline.yaml")
    assert {one["state"] for one in again.values()} == {"finished"}


def test_steps_after_one_that_failed_are_cancelled_with_the_reason_and_submitted_again_with_it(
    login: LoginNode, tmp_path: Path
) -> None:
    add(login, tmp_path, "pipeline.yaml", FAILS)
    add(login, tmp_path, "tell.py", TELL)
    add(login, tmp_path, "fail.py", "import sys\nsys.exit('the data is missing')\n")
    first = submit(login, "pipeline.yaml")
    login.await_state("bad-clean", "finished")

    evaluate, export = (login.await_state(f"bad-{step}", "cancelled") for step in ("evaluate", "export"))

    assert evaluate["reason"].startswith("cancelled, because bad-train failed (")
    assert export["reason"].startswith("cancelled, because bad-evaluate did not start, because bad-train failed (")
    assert not login.cluster.run("squeue", "--noheader").stdout.strip()
    assert Ledger.read(login.run("bad-evaluate")).newest is None

    add(login, tmp_path, "fail.py", "print('trained')\n")
    again = submit(login, "pipeline.yaml")
    assert (again["train"]["state"], again["clean"]["state"]) == ("queued", "finished")
    assert again["evaluate"]["job_id"] != first["evaluate"]["job_id"]
    login.await_state("bad-export", "finished")
