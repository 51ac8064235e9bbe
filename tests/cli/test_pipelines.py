"""Pipelines from the command line: on this machine to their end, and on a Slurm that is made of shell scripts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.run_dir.ledger import Ending, Ledger, record_end, record_start
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from ddp_hpc.submission.preflight import capacity
from tests.unit.fake_slurm import FakeSlurm

PIPELINE = """
name: digits
resources: {workers_per_node: 1}
restart: {max_no_progress: 1}
script: {start: exec}
steps:
  train: {script: {command: [python, step.py, train]}}
  evaluate: {after: train, script: {command: [python, step.py, evaluate, "{train.run_dir}"]}}
  export: {after: evaluate, script: {command: [python, step.py, export]}}
  report: {after: "evaluate:notok", script: {command: [python, step.py, report]}}
"""
EXAMPLES = Path(__file__).parents[2] / "examples"
STEP = """
import pathlib, sys
with open("order", "a") as file:
    file.write(sys.argv[1] + " ")
sys.exit(sys.argv[1] == "evaluate" and not pathlib.Path("mended").exists() and "not good enough")
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pipeline.yaml").write_text(PIPELINE)
    Path("step.py").write_text(STEP)


def submit(*words: str) -> int:
    return main(["submit", "pipeline.yaml", *words])


def test_on_one_machine_steps_run_in_order_and_those_after_a_failure_do_not_until_it_is_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--cluster", "local", "--wait") == 1
    out = capsys.readouterr().out
    assert Path("order").read_text() == "train evaluate report "
    assert "digits-evaluate failed: " in out
    assert "digits-export: not started, because digits-evaluate did not finish\n" in out
    assert not (tmp_path / "runs" / "digits-export").exists()
    Path("mended").touch()

    assert submit("--cluster", "local", "--wait", "--json") == 0

    records = {one["step"]: one for one in json.loads(capsys.readouterr().out)}
    assert Path("order").read_text() == "train evaluate report evaluate export "
    assert [one["state"] for one in records.values()] == ["finished", "finished", "finished", "not started"]
    assert records["report"]["reason"] == "digits-evaluate has finished"


@pytest.mark.long
def test_the_example_trains_evaluates_the_newest_checkpoint_and_exports_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("pipeline.yaml", "evaluate.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    few = (
        "steps.train.train.epochs=3",
        "steps.train.resources.workers_per_node=1",
        "steps.train.lr_schedule.warmup_steps=5",
    )
    lower = 'steps.evaluate.script.command=[python, evaluate.py, "{train.run_dir}", --at-least, accuracy=0.15]'

    assert submit("--cluster", "local", "--wait", *few, lower) == 0, capfd.readouterr()

    evaluated = RunDir(tmp_path / "runs" / "digits-evaluate").console.read_text()
    assert "{'accuracy': 0." in evaluated
    assert (tmp_path / "runs" / "digits-export" / "model.safetensors").exists()


def test_on_one_machine_a_pipeline_needs_a_command_that_waits(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--cluster", "local") == 2

    assert "Add `--wait`, or `--follow`" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "words", [("--sweep", "seed=1,2"), ("--fresh",), ("--after", "x"), ("--singleton",), ("--", "python", "step.py")]
)
def test_what_is_for_one_run_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--cluster", "local", *words) == 2

    assert "is for one run, but the configuration has `steps`" in capsys.readouterr().err


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Have a cluster that numbers its jobs from 11 on; it still has job 11, and forgets all others."""
    slurm = FakeSlurm(tmp_path)
    count = tmp_path / "count"
    count.write_text("10")
    takes = f"n=$(($(cat {count}) + 1)); echo $n > {count}; echo Submitted batch job $n"
    slurm.has("sbatch", f'[ "$1" = --test-only ] || {{ {takes}; }}')
    slurm.has("scontrol", 'case "$*" in *"show job"*) echo "Invalid job id specified" >&2; exit 1;; esac')
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(capacity, "refuse_private_directory", lambda _: None)  # the test's own may be a node's own
    monkeypatch.setattr(capacity, "refuse_private_python", lambda *_: None)
    return slurm


def dependency(name: str) -> str:
    lines = RunDir(Path("runs", name)).job_script.read_text().splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith("#SBATCH --dependency=")), "")


@pytest.mark.usefixtures("slurm")
def test_all_jobs_are_submitted_at_once_each_behind_those_before(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--cluster", "slurm") == 0

    out = capsys.readouterr().out
    assert [dependency(f"digits-{step}") for step in ("train", "evaluate", "export", "report")] == [
        *("", "afterok:11", "afterok:12", "afternotok:12")
    ]
    assert "digits-report: job 14 submitted, after evaluate:notok\n" in out
    assert out.endswith("Cancel them:  ddp-hpc cancel digits-report digits-export digits-evaluate digits-train\n")


@pytest.mark.usefixtures("slurm")
def test_a_dry_run_prints_each_script_with_the_run_it_waits_for_and_makes_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert submit("--cluster", "slurm", "--dry-run") == 0
    text = capsys.readouterr().out
    assert submit("--cluster", "slurm", "--dry-run", "--json") == 0
    records = json.loads(capsys.readouterr().out)

    assert "#SBATCH --dependency=afterok:JOB-OF-digits-train\n" in text
    assert [one["run"] for one in records] == ["digits-train", "digits-evaluate", "digits-export", "digits-report"]
    assert all(one["script"] in text for one in records)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ("sbatch: error: QOSMaxSubmitJobPerUserLimit", "QOSMaxSubmitJobPerUserLimit"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", "Slurm does not answer"),
    ],
)
def test_where_the_second_of_several_is_refused_the_message_names_what_is_in_the_queue(
    refusal: str, message: str, slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = f'[ -e {tmp_path}/sent ] && {{ echo "{refusal}" >&2; exit 1; }}; touch {tmp_path}/sent; echo Submitted batch job 11'
    slurm.has("sbatch", f'[ "$1" = --test-only ] || {{ {gone}; }}')

    assert submit("--cluster", "slurm") != 0

    err = capsys.readouterr().err
    assert "The step 'evaluate' was not submitted: " in err
    assert message in err
    assert "stay in Slurm's queue: digits-train (job 11)" in err
    assert "`ddp-hpc cancel digits-train`" in err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["digits-train"]


def test_a_step_that_slurm_would_refuse_is_named_before_any_is_submitted(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a script that asks for a partition of its own is refused: the third step's."""
    text = Path("pipeline.yaml").read_text()
    Path("pipeline.yaml").write_text(text.replace("export: {", "export: {slurm: {partition: gone}, "))
    refusal = "sbatch: error: invalid partition specified: gone"
    slurm.has("sbatch", f'grep -q "partition=gone" "${{@: -1}}" && {{ echo "{refusal}" >&2; exit 1; }}; exit 0')

    assert submit("--cluster", "slurm") != 0

    err = capsys.readouterr().err
    assert "The step 'export' cannot be submitted, so none was: " in err
    assert "gone" in err
    assert not Path("runs").exists()
    assert all("--test-only" in order for order in slurm.orders("sbatch"))


def test_ctrl_c_amid_a_pipeline_names_what_is_in_the_queue_and_the_step_that_may_be(
    slurm: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    once = (
        f"[ -e {tmp_path}/sent ] && {{ kill -INT $PPID; exit 1; }}; touch {tmp_path}/sent; echo Submitted batch job 11"
    )
    slurm.has("sbatch", f'[ "$1" = --test-only ] || {{ {once}; }}')

    assert submit("--cluster", "slurm") == 130

    err = capsys.readouterr().err
    assert "stay in Slurm's queue: digits-train (job 11). Submit the pipeline again" in err
    assert "digits-evaluate may have been submitted, too: see `ddp-hpc status digits-evaluate`" in err


def test_a_pipeline_that_is_submitted_again_leaves_what_has_finished_and_waits_for_the_new_job(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--cluster", "slurm") == 0
    run = RunDir(Path("runs/digits-train").absolute())
    record_start(run, attempt=0, job_id="11")
    record_end(run, attempt=0, ending=Ending.FAILED, exit_code=1, reason="the data is missing")
    waits = "echo 'JobId=12 JobName=x UserId=ada(1) JobState=PENDING Reason=Dependency Command=x'"
    slurm.has(
        "scontrol", f'case "$*" in *"show job 12"*) {waits};; *"show job"*) echo "Invalid job id" >&2; exit 1;; esac'
    )
    capsys.readouterr()

    assert submit("--cluster", "slurm") == 0

    out = capsys.readouterr().out
    assert "digits-train: job 15 submitted" in out
    assert slurm.orders("scancel") == ["scancel 12"], "it waited for a job that had failed"
    assert dependency("digits-evaluate") == "afterok:15"


def test_the_state_says_which_run_has_failed_even_when_slurm_knows_the_job_no_more(
    slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--cluster", "slurm") == 0
    run = RunDir(Path("runs/digits-train").absolute())
    record_start(run, attempt=0, job_id="11")
    record_end(run, attempt=0, ending=Ending.FAILED, exit_code=1, reason="the data is missing.")
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
    assert submit("--cluster", "slurm") == 0
    runs = "echo 'JobId=11 JobName=x UserId=ada(1) JobState=RUNNING Reason=None Command=x'"
    slurm.has(
        "scontrol", f'case "$*" in *"show job 11"*) {runs};; *"show job"*) echo "Invalid job id" >&2; exit 1;; esac'
    )
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
    assert main(["submit", "name=first", *one, "--", "python", "step.py", "train"]) == 0
    assert main(["submit", "name=then", *one, "--after", "first", "--", "python", "step.py", "export"]) == 0

    def reason(by_slurm: str) -> str:
        fields = ["12", "12", "N/A", "PENDING", by_slurm, "gpu", "1", "", "1:00:00", "N/A", "N/A", "0", "then", ""]
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
    record_end(run, attempt=0, ending=Ending.STOPPED, exit_code=99)
    assert reason("DependencyNeverSatisfied").startswith("first was stopped, so this job will never start; cancel it")
