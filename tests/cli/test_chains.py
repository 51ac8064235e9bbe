"""Runs after each other: the examples with three of them, on this machine to their end, and on a Slurm that is made of shell scripts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.launch.submission.submit_checks import capacity
from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from tests.unit.fake_slurm import FakeSlurm

EXAMPLES = Path(__file__).parents[2] / "examples"
WRITES_ITS_WORDS = """#!/bin/bash
printf '%s\\0' "$@" >> words
echo >> words
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("digits.yaml", "evaluate.py", "three_runs_on_slurm.sh", "three_runs_on_one_machine.sh"):
        shutil.copy(EXAMPLES / name, tmp_path)


@pytest.mark.long
def test_on_one_machine_the_example_trains_evaluates_the_newest_checkpoint_and_exports_it(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    done = subprocess.run(["./three_runs_on_one_machine.sh"], env=environ, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    evaluated = RunDir(tmp_path / "runs" / "digits-evaluate").console.read_text()
    assert "{'accuracy': 0.9" in evaluated
    assert (tmp_path / "runs" / "digits-export" / "model.safetensors").exists()


@pytest.mark.long
def test_on_one_machine_the_example_begins_no_run_after_one_that_failed(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DDP_HPC__TRAIN__EPOCHS": "1",
    }
    script = tmp_path / "three_runs_on_one_machine.sh"
    script.write_text(script.read_text().replace("accuracy=0.9", "accuracy=1.1"))

    done = subprocess.run([script], env=environ, capture_output=True, text=True, check=False)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "digits-evaluate failed" in done.stdout
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-evaluate", "digits-train"]


@pytest.fixture
def slurm(_users_part_unchecked: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Have a cluster that numbers its jobs from 11 on; all wait."""
    slurm = FakeSlurm(tmp_path)
    count = tmp_path / "count"
    count.write_text("10")
    takes = f"n=$(($(cat {count}) + 1)); echo $n > {count}; echo Submitted batch job $n"
    slurm.has("sbatch", f'[ "$1" = --test-only ] || {{ {takes}; }}')
    has_jobs(slurm, "1?", "PENDING")
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(capacity, "refuse_node_local_path", lambda _: None)  # the test's own may be a node's own
    return slurm


def has_jobs(slurm: FakeSlurm, pattern: str, state: str) -> None:
    """Have Slurm know the jobs whose numbers fit the pattern, and no others."""
    knows = f'echo "JobId=${{@: -1}} JobName=x UserId=ada(1) JobState={state} Reason=Dependency Command=x"'
    gone = 'echo "Invalid job id specified" >&2; exit 1'
    slurm.has("scontrol", f'case "$*" in *"show job "{pattern}) {knows};; *"show job"*) {gone};; esac')


def submit_three() -> None:
    """Submit what the example submits."""
    stand_in = Path("stand-in", "ddp-hpc")
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(WRITES_ITS_WORDS)
    stand_in.chmod(0o755)
    Path("words").unlink(missing_ok=True)
    environ = {**os.environ, "PATH": f"{stand_in.parent.absolute()}:{os.environ['PATH']}"}
    subprocess.run(["./three_runs_on_slurm.sh"], env=environ, check=True)
    for line in Path("words").read_text().splitlines():
        assert main(line.removesuffix("\0").split("\0")) == 0


def dependency(name: str) -> str:
    lines = RunDir(Path("runs", name)).job_script.read_text().splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith("#SBATCH --dependency=")), "")


def fail_train() -> RunDir:
    run = RunDir(Path("runs/digits-train").absolute())
    record_start(run, attempt=0, job_id="11")
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, reason="the data is missing."))
    return run


@pytest.mark.usefixtures("slurm")
def test_the_example_submits_three_jobs_at_once_each_behind_the_one_before() -> None:
    submit_three()

    assert [dependency(f"digits-{step}") for step in ("train", "evaluate", "export")] == [
        "",
        "afterok:11",
        "afterok:12",
    ]
    script = RunDir(Path("runs/digits-export")).job_script.read_text()
    assert "#SBATCH --kill-on-invalid-dep=yes\n" in script


def test_the_example_that_is_started_again_after_a_failure_waits_for_the_new_jobs(slurm: FakeSlurm) -> None:
    submit_three()
    fail_train()
    has_jobs(slurm, "1[4-9]", "PENDING")

    submit_three()

    assert [dependency(f"digits-{step}") for step in ("train", "evaluate", "export")] == [
        "",
        "afterok:14",
        "afterok:15",
    ]


def test_the_state_says_which_run_has_failed_even_when_slurm_knows_the_job_no_more(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_three()
    report = ["name=digits-report", "resources.workers_per_node=1", "--after", "digits-evaluate:notok"]
    assert main(["submit", *report, "--", "python", "evaluate.py"]) == 0
    has_jobs(slurm, "none", "COMPLETED")
    run = fail_train()
    capsys.readouterr()

    def status(step: str) -> tuple[str, str]:
        assert main(["status", f"digits-{step}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["state"], found["reason"]

    why = "digits-train failed (the data is missing)"
    assert status("evaluate") == ("cancelled", f"cancelled, because {why}")
    assert status("export") == ("cancelled", f"cancelled, because digits-evaluate did not start, because {why}")
    assert status("report")[0] == "unknown", "it waits for such an end"
    assert main(["list"]) == 0
    assert f"digits-evaluate: cancelled, because {why}\n" in capsys.readouterr().err
    job = read_queued_job(run)
    assert job is not None
    write_queued_job(run, QueuedJob(job_id="99", attempt=1, at=job.at))
    assert status("evaluate")[1].endswith(why), "the record is of the job that it waited for, not of the run's newest"
    assert len(Ledger.read(run).attempts) == 1


def test_several_runs_are_cancelled_in_one_command_and_one_that_is_over_keeps_no_other(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    submit_three()
    has_jobs(slurm, "11", "RUNNING")
    capsys.readouterr()

    assert main(["cancel", "digits-evaluate", "digits-train"]) == 2

    out, err = capsys.readouterr()
    assert "digits-evaluate has no job in the queue" in err
    assert out.startswith("Job 11 of digits-train was cancelled.")
    assert slurm.orders("scancel") == ["scancel 11"]


def test_a_run_that_waits_by_after_names_the_run_and_says_when_it_will_never_start(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = "echo 'JobId=11 JobName=x UserId=ada(1) JobState=PENDING Reason=Priority Command=x'"
    slurm.has("scontrol", f'case "$*" in *"show job"*) {waits};; esac')
    one = ("resources.workers_per_node=1", "--cluster", "slurm")
    assert main(["submit", "name=first", *one, "--", "python", "evaluate.py", "train"]) == 0
    assert main(["submit", "name=then", *one, "--after", "first", "--", "python", "evaluate.py", "export"]) == 0

    def reason(by_slurm: str) -> str:
        fields = ["12", "12", "N/A", "PENDING", by_slurm, "N/A"]
        row = "".join(f"{field}\\037" for field in fields).removesuffix("\\037") + "\\036"
        slurm.has("squeue", f"printf '{row}'")
        for cache in Path(".cache/ddp_hpc").glob("queue-*.json"):
            cache.unlink()
        capsys.readouterr()
        assert main(["status", "then", "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["reason"])

    assert reason("Dependency") == "the job waits until first has finished"
    run = RunDir(Path("runs/first").absolute())
    record_start(run, attempt=0, job_id="11")
    record_end(run, 0, End(ending=Ending.STOPPED, exit_code=99))
    assert reason("DependencyNeverSatisfied").startswith("first was stopped, so the job will not start; cancel it")
    assert main(["logs", "--follow", "then"]) == 1
    assert "error: Job 12 of then never starts: first was stopped" in capsys.readouterr().err


@pytest.mark.parametrize("stay", ["--wait", "--follow"])
@pytest.mark.parametrize(
    ("state", "reason", "why"),
    [
        ("PENDING", "DependencyNeverSatisfied", "another job, which this one needs, failed, so the job will not start"),
        (
            "CANCELLED",
            "DependencyNeverSatisfied",
            "another job, which this one needs, failed, so the job will not start",
        ),
        ("PENDING", "PartitionTimeLimit", "the job's time limit is longer than its partition allows"),
        ("PENDING", "QOSMaxGRESPerJob", "the job asks for more than its QOS allows one job (GPUs)"),
    ],
)
def test_a_wait_ends_with_the_reason_where_the_job_will_never_start(  # noqa: PLR0917
    state: str, reason: str, why: str, stay: str, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if (state, stay) == ("CANCELLED", "--follow"):
        pytest.skip("it shows the state, and ends")
    told = f"echo 'JobId=11 JobName=x UserId=ada(1) JobState={state} Reason={reason} Command=x'"
    slurm.has("scontrol", f'case "$*" in *"show job"*) {told};; esac')
    monkeypatch.setattr("ddp_hpc.launch.submission.slurm._ASK_PAUSES_S", (0.0, 0.0))
    one = ("resources.workers_per_node=1", "slurm.dependency=afterok:7", "--cluster", "slurm", stay)

    assert main(["submit", "name=then", *one, "--", "python", "evaluate.py", "export"]) == 1

    assert f"error: Job 11 of then never starts: {why}" in capsys.readouterr().err
    script = next(Path("runs/then").rglob("*.sbatch")).read_text()
    assert "#SBATCH --kill-on-invalid-dep=yes" in script


@pytest.mark.long
def test_a_wait_for_a_held_job_says_once_who_is_to_act(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    count = tmp_path / "asked"
    why = f"echo x >> {count}; [ $(wc -l < {count}) -gt 4 ] && why=PartitionTimeLimit || why=JobHeldAdmin"
    told = 'echo "JobId=11 JobName=x UserId=ada(1) JobState=PENDING Reason=$why Command=x"'
    slurm.has("scontrol", f'case "$*" in *"show job"*) {why}; {told};; esac')
    monkeypatch.setattr("ddp_hpc.launch.submission.slurm._ASK_PAUSES_S", (0.0, 0.0))
    words = ("name=held", "resources.workers_per_node=1", "slurm.extra.hold=true", "--cluster", "slurm", "--wait")

    assert main(["submit", *words, "--", "python", "evaluate.py", "export"]) == 1

    said = capsys.readouterr()
    assert said.err.count("note: job 11 of held waits: an administrator holds the job; ask your cluster's support") == 1
    assert "could start" not in said.out
