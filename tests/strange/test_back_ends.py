"""Runs that are half of one back end and half of another, and login nodes whose sbatch is a wrapper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm import client
from ddp_hpc.launch.submission.allocate import submit_job_script
from ddp_hpc.launch.submission.backend import backend_of, backends_of
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.records import QueuedJob, write_queued_job
from tests.made_run import make_run
from tests.unit.fake_slurm import FakeSlurm

BANNER = """\
-----------------------------------------------------------------
          Welcome to the Hydra Supercomputer
-----------------------------------------------------------------

No reservation for this job
--> Verifying valid submit host (login1)...OK
--> Verifying valid jobname...OK
"""


def test_a_site_whose_sbatch_greets_its_users_still_tells_the_jobs_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    run.job_script.write_text("#!/bin/bash\n")
    (tmp_path / "banner").write_text(BANNER)
    parsable = '[ "$1" = --parsable ] && echo 17 || echo Submitted batch job 17'
    slurm.has("sbatch", f"cat {tmp_path}/banner; {parsable}")
    slurm.has("srun", "true")
    monkeypatch.setenv("PATH", slurm.environ["PATH"])

    assert submit_job_script(run, slurm.environ) == "17"
    assert client.submit(run.job_script, slurm.environ) == "17"


def test_a_note_of_a_version_that_knew_no_back_ends_is_slurms(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.submission.write_text(json.dumps({"job_id": "7", "attempt": 0, "at": 1.0}))

    assert backend_of(run).NAME == "slurm"


def test_a_job_that_waits_is_not_forgotten_where_a_later_attempt_ran_here(tmp_path: Path) -> None:
    """As on a laptop that sees the run's directory, and no Slurm."""
    run = make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=1.0))
    record_start(run, attempt=0, job_id="1")

    assert [backend.NAME for backend in backends_of(run)] == ["local", "slurm"]


def test_a_job_that_waits_after_an_attempt_here_is_slurms_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="1")
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=1.0))

    assert [backend.NAME for backend in backends_of(run)] == ["slurm", "local"]


def test_a_run_that_slurm_ran_is_slurms_though_the_note_of_its_job_is_lost(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="7", cluster="slurm", nodes=("node1",))

    assert backend_of(run).NAME == "slurm"
    with pytest.raises(ConfigError, match="has no job in the queue"):
        backend_of(run).cancel(run, {"PATH": "/nowhere"})


@pytest.mark.parametrize("name", [5, None, ["slurm"]])
def test_a_back_end_that_is_no_name_makes_a_line_of_the_ledger_odd(name: object, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    known = {"attempt": 0, "job_id": "1", "host": "here", "pid": 1, "started_at": 1.0, "cluster": name}
    append_json_line(run.attempts, known)

    assert backends_of(run) == []
    assert backend_of(run).NAME == "local"


def test_a_note_that_a_hand_has_spoilt_is_an_error_that_says_what_is_there(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.submission.write_text(json.dumps({"job_id": "7", "attempt": 0, "at": 1.0, "backend": "slurm, please"}))

    with pytest.raises(ConfigError, match="this version of ddp-hpc knows only local, slurm"):
        backend_of(run)
