"""Runs that wait for others in Slurm's queue, over a requeue of the run that they wait for."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.records import read_progress, read_queued_job
from tests.slurm.lab.settings import ROOT
from tests.slurm.runs import SMALL, LoginNode

pytestmark = pytest.mark.long


TELL = """#!/bin/bash
echo "$DDP_HPC_EVENT $DDP_HPC_STATE $DDP_HPC_JOB_ID" >> told.txt
"""


def test_a_run_waits_for_the_end_of_another_over_its_requeue_and_a_third_for_its_failure_never_starts(
    login: LoginNode, tmp_path: Path
) -> None:
    (tmp_path / "tell.sh").write_text(TELL)
    (tmp_path / "tell.sh").chmod(0o755)
    login.add_recipe(tmp_path / "tell.sh")
    one, few = ("resources.workers_per_node=1",), SMALL
    login.submit(
        "first",
        *one,
        "train.max_steps=400",
        "train.epochs=100",
        "checkpoint.every_steps=20",
        "notify.command=[./tell.sh]",
    )
    login.await_state("first", "running")
    said = login.submit("then", *one, *few, "--after", "first")
    login.submit("else", *one, *few, "--after=first:notok")
    job = read_queued_job(login.run("first"))
    assert job is not None

    script = login.run("then").job_script.read_text()
    assert f"#SBATCH --dependency=afterok:{job.job_id}\n" in script, said
    asked = login.type("requeue", "first")
    assert asked.returncode == 0, asked.stderr
    login.cluster.wait_for(lambda: len(Ledger.read(login.run("first")).attempts) > 1 or _hasten(login), 180)
    assert not Ledger.read(login.run("then")).attempts, "the run that it waits for is requeued, not finished"

    login.await_state("first", "finished")
    login.await_state("then", "finished")
    first, then = (Ledger.read(login.run(name)).attempts[-1] for name in ("first", "then"))
    assert then.started_at >= (first.ended_at or 0.0)
    told = (login.folder / "told.txt").read_text().splitlines()
    assert told == [f"start running {job.job_id}", f"end finished {job.job_id}"], "two attempts, one start"
    assert Ledger.read(login.run("else")).newest is None
    login.cluster.wait_for(lambda: "else" not in login.cluster.run("squeue", "-h", "-o", "%j").stdout, 60)

    late = login.type("submit", "digits.yaml", "name=late", "--cluster", "slurm", "--after", "first:notok", *one, *few)
    assert late.returncode == 2
    assert "has finished" in late.stderr
    assert not login.run("late").path.exists()
    login.submit("soon", *one, *few, "--after", "first", "slurm.dependency=singleton")
    assert "#SBATCH --dependency=singleton\n" in login.run("soon").job_script.read_text()
    login.await_state("soon", "finished")


def _hasten(login: LoginNode) -> bool:
    """Start the requeued job before Slurm's delay is over."""
    login.type("requeue", "first", "--now")
    return False


STEPS = ("train", "evaluate", "export")


def submit_three(login: LoginNode, tmp_path: Path, before: str, after: str) -> None:
    """Start the example with three runs, with a change; its evaluation is not tried again."""
    text = (ROOT / "examples" / "three_runs_on_slurm.sh").read_text()
    assert before in text
    (tmp_path / "three.sh").write_text(text.replace(before, after))
    login.add_recipe(tmp_path / "three.sh")
    login.add_recipe(ROOT / "examples" / "evaluate.py")
    login.cluster.run("bash", "three.sh", cwd=login.folder, env={"DDP_HPC__RESTART__MAX_NO_PROGRESS": "1"}, timeout=300)


def test_the_example_waits_over_a_preemption_of_its_first_run(login: LoginNode, tmp_path: Path) -> None:
    place = ("slurm.partition=low", "slurm.nodelist=node1", "train.epochs=60", "resources.workers_per_node=1")
    submit_three(login, tmp_path, "name=digits-train\n", f"name=digits-train {' '.join(place)}\n")
    train = login.run("digits-train")

    def is_training() -> bool:
        progress = read_progress(train)
        return progress is not None and progress.step >= 60

    login.cluster.wait_for(is_training, 180)
    assert login.status("digits-export")["reason"] == "the job waits until digits-evaluate has finished"
    urgent = ("--partition=high", "--nodelist=node1", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3")
    login.cluster.run("sbatch", *urgent, cwd=login.folder)
    login.await_state("digits-export", "finished", timeout_s=300)

    first, *_, last = Ledger.read(train).attempts
    assert (first.cause, last.ending, last.job_id) == ("preempted", "finished", first.job_id)
    ends = [Ledger.read(login.run(f"digits-{step}")).attempts for step in STEPS]
    for before, after in itertools.pairwise(ends):
        assert len(after) == 1
        assert after[0].started_at >= (before[-1].ended_at or 0.0)
    assert (login.run("digits-export").path / "model.safetensors").exists()


def test_the_example_leaves_no_job_behind_one_that_failed_and_is_started_again_with_it(
    login: LoginNode, tmp_path: Path
) -> None:
    submit_three(login, tmp_path, "accuracy=0.9", "accuracy=1.1")
    assert login.await_state("digits-evaluate", "failed")

    export = login.await_state("digits-export", "cancelled")

    assert export["reason"].startswith("cancelled, because digits-evaluate failed (")
    assert not login.cluster.run("squeue", "--noheader").stdout.strip()
    assert Ledger.read(login.run("digits-export")).newest is None

    submit_three(login, tmp_path, "accuracy=0.9", "accuracy=0.8")
    login.await_state("digits-export", "finished")
    assert [len(Ledger.read(login.run(f"digits-{step}")).attempts) for step in STEPS] == [1, 2, 1]
