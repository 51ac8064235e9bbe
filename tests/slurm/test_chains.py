"""Runs that wait for others in Slurm's queue, over a requeue of the run that they wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.run_dir.ledger import Ledger
from ddp_hpc.run_dir.records import read_queued_job
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
    assert login.type("cancel", "else").returncode == 0

    late = login.type("submit", "digits.yaml", "name=late", "--cluster", "slurm", "--after", "first:notok", *one, *few)
    assert late.returncode == 2
    assert "has finished" in late.stderr
    assert not login.run("late").path.exists()
    login.submit("soon", *one, *few, "--after", "first", "--singleton")
    assert "#SBATCH --dependency=singleton\n" in login.run("soon").job_script.read_text()
    login.await_state("soon", "finished")


def _hasten(login: LoginNode) -> bool:
    """Start the requeued job before Slurm's delay is over."""
    login.type("requeue", "first", "--now")
    return False
