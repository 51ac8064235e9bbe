"""Starting a job that nothing but its past holds back; and that who waits for it changes nothing."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError, SlurmRefusalError, WorkerError
from ddp_hpc.cli import main
from ddp_hpc.cli.verbs import requeue
from ddp_hpc.cluster.slurm.queries import JobRecord
from ddp_hpc.launch.submission.release_hold import changes_to_let_in, changes_to_start, hasten
from ddp_hpc.launch.submission.slurm import _require_alive
from ddp_hpc.run.config.resolve import Resolved, flat_spec, render_resolved
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Next, record_end, record_start
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from ddp_hpc.run.spec import ResourcesSpec, RunSpec
from tests.made_run import make_run
from tests.unit.fake_slurm import FakeSlurm


@pytest.mark.parametrize(
    ("eligible_in_s", "change"),
    [
        (120.0, {"StartTime": "now+2"}),  # Slurm's own
        (None, {"StartTime": "now+2"}),
        (1.5, {}),  # ours: not yet
        (-0.5, {"StartTime": "now"}),
    ],
)
def test_a_requeued_job_is_told_to_begin_but_not_in_the_second_of_its_requeue(
    eligible_in_s: float | None, change: dict[str, str]
) -> None:
    eligible_at = None if eligible_in_s is None else 1000.0 + eligible_in_s
    job = JobRecord(job_id="7", state="PENDING", reason="BeginTime", eligible_at=eligible_at)

    assert changes_to_start(QueuedJob(job_id="7", attempt=2, at=0.0, since=1), job, now=1000.0) == change


@pytest.mark.parametrize(
    ("attempt", "state", "reason"),
    [(1, "PENDING", "BeginTime"), (2, "PENDING", "Resources"), (2, "RUNNING", ""), (2, "COMPLETING", "BeginTime")],
)
def test_a_job_that_waits_for_anything_else_is_left_alone(attempt: int, state: str, reason: str) -> None:
    """Such as for the time that the user has set at submit."""
    queued = QueuedJob(job_id="7", attempt=attempt, at=0.0, since=1)

    assert changes_to_start(queued, JobRecord(job_id="7", state=state, reason=reason), now=0.0) == {}


SHORT = JobRecord(
    job_id="7", state="PENDING", reason="ReqNodeNotAvail,_UnavailableNodes:node1", excluded_nodes="node[2,4]"
)


@pytest.mark.parametrize(
    ("let_in", "change"),
    [
        ({"node2"}, {"ExcNodeList": "node4"}),
        ({"node2", "node4"}, {"ExcNodeList": ""}),
        ({"node3"}, {}),  # it is not left out
        (set(), {}),
    ],
)
def test_a_job_that_waits_for_lost_nodes_gets_those_back_that_it_left_out(
    let_in: set[str], change: dict[str, str]
) -> None:
    assert changes_to_let_in(SHORT, let_in) == change


@pytest.mark.parametrize(
    "other",
    [replace(SHORT, reason="Resources"), replace(SHORT, state="RUNNING", reason=""), replace(SHORT, excluded_nodes="")],
    ids=["waits for its turn", "runs", "leaves out none"],
)
def test_a_job_that_does_not_lack_nodes_is_left_alone(other: JobRecord) -> None:
    assert changes_to_let_in(other, {"node2"}) == {}


@pytest.mark.parametrize("reason", ["ReqNodeNotAvail,_UnavailableNodes:node1", "BadConstraints"])
def test_a_user_who_asks_has_slurm_let_in_as_many_nodes_as_the_job_needs(tmp_path: Path, reason: str) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.knows_nodes(node1="down*", node2="idle", node3="idle", node4="idle")
    shown = (
        f"JobId=7 JobName=x UserId=ada(1) JobState=PENDING Reason={reason} Restarts=1 "
        "Partition=batch ExcNodeList=node[2,4] Command=x"
    )
    slurm.has("scontrol", f'[ "$2" = show ] && echo "{shown}"; true')
    run = make_run(tmp_path)
    spec = RunSpec(name=run.name, runs_dir=str(tmp_path), resources=ResourcesSpec(nodes=2))
    run.config.write_text(render_resolved(Resolved(spec, dict.fromkeys(flat_spec(spec), "test"))))
    for attempt, node in enumerate(["node2", "node2", "node4", "node4", "node4"]):
        record_start(run, attempt=attempt, job_id="7", cluster="slurm", nodes=("node2", "node4"))
        end = End(ending=Ending.FAILED, exit_code=1, cause=Cause.WORKER_CRASHED, failed_nodes=(node,))
        record_end(run, attempt, end)
    write_queued_job(run, QueuedJob(job_id="7", attempt=5, at=0.0, since=0))

    assert hasten(run, slurm.environ)

    assert slurm.orders("scontrol") == ["scontrol update JobId=7 ExcNodeList=node4"]  # node2 failed less often


def test_a_job_that_waits_for_its_turn_cannot_be_hastened_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.knows(state="PENDING", reason="Priority")
    run = make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0, since=0))
    monkeypatch.setattr(requeue, "CLEANUP_PATIENCE_S", 0.1)
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what Slurm said to others of a job 7 is kept for a while

    code = main(["requeue", str(run.path), "--now"])

    assert code == exit_codes.FAILED
    assert "`--now` cannot start" in capsys.readouterr().err
    assert slurm.orders("scontrol") == []


def test_a_job_that_waits_only_since_the_queue_was_listed_is_started_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    record_start(run, attempt=0, job_id="7")
    record_end(run, 0, End(ending=Ending.STOPPED, exit_code=99, next=Next.REQUEUE))
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0, since=0))
    slurm.knows(state="PENDING", reason="BeginTime")
    row = "".join(f"{one}\\037" for one in ["7", "7", "N/A", "COMPLETING", "", ""]).removesuffix("\\037")
    slurm.has("squeue", f"printf '{row}\\036'")
    monkeypatch.setattr(requeue, "BEGIN_PATIENCE_S", 0.1)
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert main(["requeue", str(run.path), "--now"]) == 0

    assert "is back in the queue, without a delay" in capsys.readouterr().out
    assert "scontrol update JobId=7 StartTime=now+2" in slurm.orders()


@pytest.mark.parametrize("words", [[], ["--now"]])
def test_nobody_is_told_to_start_a_job_that_another_holds(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.knows(state="PENDING", reason="JobHeldAdmin")
    run = make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0, since=0))
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    since = time.monotonic()

    assert main(["requeue", str(run.path), *words]) != 0

    said = capsys.readouterr().err
    assert "an administrator holds the job" in said
    assert "add `--now`" not in said
    assert time.monotonic() - since < 10  # not as long as for a job that Slurm cleans up after


@pytest.mark.parametrize(
    ("state", "reason", "is_released"),
    [
        ("PENDING", "launch_failed_requeued_held", True),
        ("PENDING", "launch failed requeued held", True),  # as squeue writes it
        ("PENDING", "JobHeldUser", False),
        ("RUNNING", "launch_failed_requeued_held", False),
    ],
)
def test_a_job_that_slurm_could_not_launch_is_released_as_often_as_its_user_asks(
    state: str, reason: str, is_released: bool, tmp_path: Path
) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0))
    slurm.knows(state=state, reason=reason.replace(" ", "_"), restarts=9)

    assert hasten(run, slurm.environ) is is_released
    assert slurm.orders() == (["scontrol release 7"] if is_released else [])


@pytest.mark.parametrize(
    "job",
    [
        {"state": "PENDING", "reason": "BeginTime"},
        {"state": "PENDING", "reason": "launch_failed_requeued_held"},
        {"state": "PENDING", "reason": "ReqNodeNotAvail,_UnavailableNodes:node1"},
        {"state": "RUNNING", "reason": "None"},
    ],
    ids=str,
)
def test_who_waits_for_a_run_changes_nothing_in_its_job(job: dict[str, str], tmp_path: Path) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    queued = QueuedJob(job_id="7", attempt=1, at=0.0, since=0)
    write_queued_job(run, queued)
    slurm.knows(state=job["state"], reason=job["reason"])

    _require_alive(run, 0, queued, slurm.environ)

    assert slurm.orders() == []
    assert read_queued_job(run) == queued


def test_a_user_who_asks_is_told_that_an_administrator_holds_the_job(tmp_path: Path) -> None:
    """Slurm goes on to say that it could not launch it."""
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0))
    orders = "echo Access/permission denied for job 7 >&2; exit 1"
    slurm.knows(state="PENDING", reason="launch_failed_requeued_held", restarts=1, orders=orders)

    with pytest.raises(
        ConfigError,
        match=r"Access/permission denied for job 7 \(.*\)\. An administrator holds the job, and only they can release it",
    ):
        hasten(run, slurm.environ)


def test_an_administrator_is_blamed_by_slurms_code_and_not_by_a_word_of_its_message(tmp_path: Path) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0))
    orders = "echo 'Requested operation denied: node denied-3 is reserved' >&2; exit 1"
    slurm.knows(state="PENDING", reason="launch_failed_requeued_held", restarts=1, orders=orders)

    with pytest.raises(SlurmRefusalError) as refused:
        hasten(run, slurm.environ)

    assert refused.value.code == ""
    assert "node denied-3 is reserved" in str(refused.value)
    assert "An administrator" not in str(refused.value)


def test_a_wait_ends_where_the_shell_of_the_job_was_killed_and_says_how_to_go_on(tmp_path: Path) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    record_start(run, attempt=0, job_id="7", cluster="slurm", nodes=("node1",))
    queued = QueuedJob(job_id="7", attempt=0, at=0.0)
    write_queued_job(run, queued)
    slurm.knows(state="FAILED")

    with pytest.raises(WorkerError, match=r"how attempt 0 ended.*Submit the run again"):
        _require_alive(run, 0, queued, slurm.environ)

    assert slurm.orders() == []
