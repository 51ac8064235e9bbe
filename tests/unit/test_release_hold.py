"""Having a job begin that nothing but its past holds back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import ConfigError, SlurmRefusalError
from ddp_hpc.cli import main
from ddp_hpc.cli.verbs import requeue
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.cluster.slurm.queries import JobRecord
from ddp_hpc.job.ending.stale_attempts import close_stale
from ddp_hpc.job.run_records import RunRecords
from ddp_hpc.job.slurm_job import SlurmJob
from ddp_hpc.launch.submission.release_hold import MOST_RELEASES, call_back, hasten, hasten_job, hastening, letting_in
from ddp_hpc.launch.submission.slurm import _require_alive
from ddp_hpc.run.config import Resolved, flat, render_resolved
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, JobFacts, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from ddp_hpc.run.spec import ResourcesSpec, RunSpec
from ddp_hpc.run.workload.table import workload_of
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

    assert hastening(QueuedJob(job_id="7", attempt=2, at=0.0, since=1), job, now=1000.0) == change


@pytest.mark.parametrize(
    ("attempt", "state", "reason"),
    [(1, "PENDING", "BeginTime"), (2, "PENDING", "Resources"), (2, "RUNNING", ""), (2, "COMPLETING", "BeginTime")],
)
def test_a_job_that_waits_for_anything_else_is_left_alone(attempt: int, state: str, reason: str) -> None:
    """Such as for the time that the user has set at submit."""
    queued = QueuedJob(job_id="7", attempt=attempt, at=0.0, since=1)

    assert hastening(queued, JobRecord(job_id="7", state=state, reason=reason), now=0.0) == {}


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
    assert letting_in(SHORT, let_in) == change


@pytest.mark.parametrize(
    "other",
    [replace(SHORT, reason="Resources"), replace(SHORT, state="RUNNING", reason=""), replace(SHORT, excluded_nodes="")],
    ids=["waits for its turn", "runs", "leaves out none"],
)
def test_a_job_that_does_not_lack_nodes_is_left_alone(other: JobRecord) -> None:
    assert letting_in(other, {"node2"}) == {}


def follow(run: RunDir, slurm: FakeSlurm) -> None:
    """Do what `--follow` and `requeue --now` do from time to time."""
    assert hasten(run, slurm.environ)


def wait_for(run: RunDir, slurm: FakeSlurm) -> None:
    """Do what `--wait` does from time to time."""
    queued = read_queued_job(run)
    assert queued is not None
    _require_alive(run, 0, queued, slurm.environ)


@pytest.mark.parametrize("stay", [follow, wait_for])
def test_who_waits_for_a_run_has_slurm_let_in_as_many_nodes_as_it_needs(
    tmp_path: Path, stay: Callable[[RunDir, FakeSlurm], None]
) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.knows_nodes(node1="down*", node2="idle", node3="idle", node4="idle")
    shown = (
        "JobId=7 JobName=x UserId=ada(1) JobState=PENDING Reason=ReqNodeNotAvail,_UnavailableNodes:node1 Restarts=1 "
        "Partition=batch ExcNodeList=node[2,4] Command=x"
    )
    slurm.has("scontrol", f'[ "$2" = show ] && echo "{shown}"; true')
    run = make_run(tmp_path)
    spec = RunSpec(name=run.name, runs_dir=str(tmp_path), resources=ResourcesSpec(nodes=2))
    run.config.write_text(render_resolved(Resolved(spec, dict.fromkeys(flat(spec), "test"))))
    for attempt, node in enumerate(["node2", "node2", "node4", "node4", "node4"]):
        record_start(run, attempt=attempt, job_id="7", job=JobFacts(nodes=("node2", "node4")))
        end = End(cause=Cause.WORKER_CRASHED, failed_nodes=(node,))
        record_end(run, attempt=attempt, ending=Ending.FAILED, exit_code=1, end=end)
    write_queued_job(run, QueuedJob(job_id="7", attempt=5, at=0.0, since=0))

    stay(run, slurm)

    assert slurm.orders() == ["scontrol update JobId=7 ExcNodeList=node4"]  # node2 failed less often


def test_a_job_that_waits_for_its_turn_cannot_be_hastened_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm = FakeSlurm(tmp_path)
    slurm.knows_job(state="PENDING", reason="Priority")
    run = make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0, since=0))
    monkeypatch.setattr(requeue, "END_PATIENCE_S", 0.1)
    monkeypatch.setenv("PATH", slurm.environ["PATH"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # what Slurm said to others of a job 7 is kept for a while

    code = main(["requeue", str(run.path), "--now"])

    assert code == exit_codes.FAILED
    assert "`--now` cannot start" in capsys.readouterr().err
    assert slurm.orders("scontrol") == []


HELD = JobRecord(job_id="7", state="PENDING", reason="launch_failed_requeued_held", restarts=2)


@pytest.mark.parametrize(
    ("job", "is_released"),
    [
        (HELD, True),
        (replace(HELD, reason="launch failed requeued held"), True),  # as squeue writes it
        (replace(HELD, restarts=MOST_RELEASES + 1), False),
        (replace(HELD, reason="JobHeldUser"), False),
        (replace(HELD, state="RUNNING"), False),
    ],
)
def test_a_job_that_slurm_could_not_launch_is_released_a_few_times(
    job: JobRecord, is_released: bool, tmp_path: Path
) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    queued = QueuedJob(job_id="7", attempt=1, at=0.0)

    assert hasten_job(run, queued, job, slurm.environ) is is_released
    assert slurm.orders() == (["scontrol release 7"] if is_released else [])


def test_a_job_that_slurm_could_not_launch_is_released_as_often_as_its_user_asks(tmp_path: Path) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0))
    slurm.knows_job(state="PENDING", reason="launch_failed_requeued_held", restarts=MOST_RELEASES + 1)

    assert not hasten(run, slurm.environ)
    assert hasten(run, slurm.environ, is_asked=True)
    assert slurm.orders() == ["scontrol release 7"]


@pytest.mark.parametrize("reason", ["launch_failed_requeued_held", "BeginTime"])
def test_by_the_users_choice_or_the_sites_a_job_begins_sooner_only_where_it_is_asked_for(
    reason: str, tmp_path: Path
) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    run.config.write_text("name: digits\nslurm: {hasten: never}\n")
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0, since=0))
    slurm.knows_job(state="PENDING", reason=reason)

    assert not hasten(run, slurm.environ)
    assert slurm.orders() == []
    assert hasten(run, slurm.environ, is_asked=True)
    assert len(slurm.orders()) == 1


def test_a_user_who_asks_is_told_that_an_administrator_holds_the_job(tmp_path: Path) -> None:
    """Slurm goes on to say that it could not launch it."""
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0))
    orders = "echo Access/permission denied for job 7 >&2; exit 1"
    slurm.knows_job(state="PENDING", reason="launch_failed_requeued_held", restarts=1, orders=orders)

    assert not hasten(run, slurm.environ)
    with pytest.raises(
        ConfigError,
        match=r"Access/permission denied for job 7 \(.*\)\. An administrator holds the job, and only they can release it",
    ):
        hasten(run, slurm.environ, is_asked=True)


def test_an_administrator_is_blamed_by_slurms_code_and_not_by_a_word_of_its_message(tmp_path: Path) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    write_queued_job(run, QueuedJob(job_id="7", attempt=1, at=0.0))
    orders = "echo 'Requested operation denied: node denied-3 is reserved' >&2; exit 1"
    slurm.knows_job(state="PENDING", reason="launch_failed_requeued_held", restarts=1, orders=orders)

    with pytest.raises(SlurmRefusalError) as refused:
        hasten(run, slurm.environ, is_asked=True)

    assert refused.value.code == ""
    assert "node denied-3 is reserved" in str(refused.value)
    assert "An administrator" not in str(refused.value)


KILLED = JobRecord(job_id="7", state="FAILED", exit_code="0:9")


@pytest.mark.parametrize(
    ("job", "ending", "is_called"),
    [
        (KILLED, None, True),
        (KILLED, "failed", False),  # its supervisor has decided
        (replace(KILLED, exit_code="1:0"), None, False),
        (replace(KILLED, state="CANCELLED"), None, False),
    ],
)
def test_a_job_whose_shell_was_killed_is_called_back_by_who_waits_for_it(
    job: JobRecord, ending: Ending | None, is_called: bool, tmp_path: Path
) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    run.config.write_text("name: run\nrecipe: {target: 'a:b'}\n")
    record_start(run, attempt=0, job_id="7", job=JobFacts(nodes=("node1",)))
    if ending is not None:
        record_end(run, attempt=0, ending=ending, exit_code=1)

    queued = QueuedJob(job_id="7", attempt=0, at=0.0)
    write_queued_job(run, queued)
    assert call_back(run, queued, job, slurm.environ) is is_called
    assert slurm.orders() == (["scontrol requeue 7"] if is_called else [])


def test_a_job_whose_shell_is_killed_each_time_is_not_called_back_for_ever(tmp_path: Path) -> None:
    slurm, run, called = FakeSlurm(tmp_path), make_run(tmp_path), []
    allocation = Allocation(job_id="7", node_names=("node1",), tasks_per_node=(1,))
    slurm_job = SlurmJob(allocation=allocation, environ=slurm.environ)
    run.config.write_text("name: run\nrecipe: {target: 'a:b'}\n")
    for attempt in range(3):
        record_start(run, attempt=attempt, job_id="7", job=JobFacts(nodes=("node1",), restart=attempt))
        slurm.accounts(*["REQUEUED"] * (attempt + 1))
        queued = QueuedJob(job_id="7", attempt=0, at=0.0)
        write_queued_job(run, queued)
        called.append(call_back(run, queued, KILLED, slurm.environ))
        # Accounting calls each start REQUEUED, as if somebody had wanted it.
        close_stale(RunRecords(run), workload_of(RunSpec(name="run")), slurm_job)

    assert called == [True, True, False]
    first = Ledger.read(run).attempts[0]
    assert (first.cause, first.ending, first.next) == ("supervisor died", "failed", "requeue")
    assert (
        first.reason
        == "signal 9 killed the job's shell and ddp-hpc in it, and a process that waited for the run, such as "
        "`ddp-hpc submit --wait`, put the job back into the queue"
    )


def test_a_job_that_was_cancelled_or_followed_by_another_meanwhile_is_not_called_back(tmp_path: Path) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    run.config.write_text("name: run\nrecipe: {target: 'a:b'}\n")
    record_start(run, attempt=0, job_id="7", job=JobFacts(nodes=("node1",)))
    seen = QueuedJob(job_id="7", attempt=0, at=0.0)
    for now in (replace(seen, cancelled_at=1.0), QueuedJob(job_id="8", attempt=1, at=1.0)):
        write_queued_job(run, now)

        assert not call_back(run, seen, KILLED, slurm.environ)
        assert read_queued_job(run) == now
    assert slurm.orders() == []


def test_a_job_that_was_called_back_need_not_wait_until_slurm_lets_requeued_jobs_begin(tmp_path: Path) -> None:
    slurm, run = FakeSlurm(tmp_path), make_run(tmp_path)
    run.config.write_text("name: run\nrecipe: {target: 'a:b'}\n")
    record_start(run, attempt=0, job_id="7", job=JobFacts(nodes=("node1",)))

    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0))
    assert call_back(run, QueuedJob(job_id="7", attempt=0, at=0.0), KILLED, slurm.environ)

    queued = read_queued_job(run)
    assert queued is not None
    assert (queued.job_id, queued.attempt, queued.since) == ("7", 1, 0)
    waits = JobRecord(job_id="7", state="PENDING", reason="BeginTime", eligible_at=1000.0)
    assert hastening(queued, waits, 900.0) == {"StartTime": "now+2"}
