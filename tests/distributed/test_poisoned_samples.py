"""Runs that meet the same bad sample again end with its name; whatever may recover gets its attempts.

Supervisor, agent and workers are real; Slurm is a folder of shell scripts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_hpc.base import exit_codes
from tests.contract.test_workloads import SRUN, Case, Job
from tests.made_run import make_run
from tests.unit.fake_slurm import FakeSlurm

SCRIPT = Path(__file__).parent / "decoding_script.py"
NOWHERE = Case(config="", disturbed="", broken="")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    slurm = FakeSlurm(tmp_path)
    slurm.knows()
    slurm.knows_nodes(node1="mixed")
    slurm.has("srun", SRUN)
    run = make_run(tmp_path, "run")
    monkeypatch.chdir(run.path)
    return Job(run, NOWHERE, slurm)


def trains(job: Job, *plan: dict[str, str], every_steps: int = 2, **more: Any) -> int:
    """Train by a plan of what fails in which attempt, to the end; return the exit code. Two steps an epoch, three epochs."""
    config = {
        "name": "run",
        "recipe": {"target": "poisoned_recipe:build", "args": {"plan": list(plan), **more.pop("args", {})}},
        "train": {"epochs": 3, "global_batch_size": 8},
        "checkpoint": {"every_steps": every_steps},
        **more,
    }
    job.run.config.write_text(yaml.safe_dump(config))
    return job.finish()


def entities(job: Job) -> list[tuple[str, bool]]:
    return [(one.root.entity, one.root.may_recover) for one in job.attempts]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "num_workers"), [(1, 1), pytest.param(2, 0, marks=pytest.mark.long)])
def test_a_sample_that_cannot_be_decoded_ends_the_run_after_two_attempts_with_its_name(
    job: Job, ranks: int, num_workers: int
) -> None:
    # Without a save: one that a failure comes before in the first attempt alone would be progress of the second one.
    more: dict[str, Any] = {"data": {"num_workers": num_workers}, "resources": {"workers_per_node": ranks}}
    code = trains(job, {"9": "damaged"}, every_steps=100, **more)

    first, second = job.attempts
    assert code == exit_codes.FAILED
    assert (first.cause, first.next, first.why_last) == ("worker crashed", "in place", "")
    assert (second.cause, second.next, second.ending) == ("worker crashed", "", "failed")
    assert (first.root.entity, first.root.may_recover) == ("train_data[9]", False)
    assert first.root == second.root
    assert "`train_data[9]` ended two attempts in a row in the same way" in second.why_last
    assert "raised JSONDecodeError: Expecting property name" in second.reason
    assert second.why_last in second.reason


@pytest.mark.long
def test_a_sample_that_a_file_system_cannot_read_gets_its_attempts_and_the_run_is_trained_to_its_end(job: Job) -> None:
    code = trains(job, {"9": "eio"}, {"9": "eio"}, {})

    assert code == exit_codes.FINISHED
    assert entities(job) == [("train_data[9]", True), ("train_data[9]", True), ("", True)]


@pytest.mark.long
def test_another_sample_is_another_failure(job: Job) -> None:
    code = trains(job, {"9": "damaged"}, {"3": "damaged"}, {})

    assert code == exit_codes.FINISHED
    assert entities(job) == [("train_data[9]", False), ("train_data[3]", False), ("", True)]


@pytest.mark.long
def test_a_checkpoint_between_two_failures_of_a_sample_is_progress(job: Job) -> None:
    args = {"good_reads": [0, 2]}  # the second attempt reads it in two epochs, and not in the third

    code = trains(job, {"9": "damaged"}, {"9": "damaged"}, {}, every_steps=1, args=args)

    assert code == exit_codes.FINISHED
    assert entities(job) == [("train_data[9]", False), ("train_data[9]", False), ("", True)]
    second, third = job.attempts[1:]
    assert second.first_step < third.first_step


@pytest.mark.long
def test_a_later_step_is_progress_though_no_checkpoint_came(job: Job) -> None:
    code = trains(job, {"9": "damaged"}, {"9": "damaged"}, {}, every_steps=100, args={"good_reads": [0, 1]})

    assert code == exit_codes.FINISHED
    first, second, third = job.attempts
    assert first.root.failed_step is not None
    assert second.root.failed_step is not None
    assert first.root.failed_step < second.root.failed_step
    assert third.first_step == 0


@pytest.mark.long
def test_a_script_gets_its_attempts_as_neither_its_steps_nor_its_order_are_known(job: Job) -> None:
    index = job.run.path / "index.json"
    index.write_text("{")
    os.utime(index, (1000, 1000))
    script = {"command": [sys.executable, str(SCRIPT), index.name], "progress": "saved/*"}
    job.run.config.write_text(yaml.safe_dump({"name": "run", "script": script}))

    job.finish()

    assert [(one.root.entity, one.root.may_recover) for one in job.attempts] == [("index.json", True)] * 3
    assert "3 attempts in a row" in job.attempts[-1].why_last
