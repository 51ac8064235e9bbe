"""Which events of a run the user's command is started for, and that no event starts it twice, also not in the job after a requeue."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.cluster.slurm.allocation import read_allocation
from ddp_hpc.job.ending.attempt_end import Conclusion
from ddp_hpc.job.job_context import JobContext
from ddp_hpc.job.notify import Notifier
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Next, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, QueuedJob, write_progress, write_queued_job
from ddp_hpc.run.spec import NotifySpec, RunSpec
from ddp_hpc.run.workload.table import workload_of
from ddp_hpc.run.world import World
from tests.unit.made_network import batch


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    (tmp_path / "run").mkdir()
    return RunDir(tmp_path / "run")


def notifier(run: RunDir, *, on_slurm: bool = False, **notify: Any) -> Notifier:
    tell = ["bash", "-c", f'echo "$DDP_HPC_JSON" >> {run.path}/told']
    spec = RunSpec(name="run", runs_dir=str(run.path.parent), notify=NotifySpec(**{"command": tell, **notify}))
    return Notifier(
        context=JobContext(
            run=run,
            spec=spec,
            workload=workload_of(spec),
            world=World(num_nodes=1, workers_per_node=1),
            allocation=read_allocation(batch()) if on_slurm else None,
            is_for_slurm=on_slurm,
            environ={"PATH": "/usr/bin:/bin"},
        )
    )


def told(run: RunDir, of: Notifier) -> list[dict[str, str]]:
    of.wait_for_commands(goes_on=False)
    path = run.path / "told"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def end(ending: Ending, follows: Next = Next.NOTHING, attempt: int = 0) -> Conclusion:
    end = End(ending=ending, cause=Cause.WORKER_CRASHED, next=follows, reason="rank 1: out of memory")
    return Conclusion(attempt=attempt, end=end)


@pytest.mark.parametrize(
    ("ending", "follows", "expected"),
    [
        (Ending.FINISHED, Next.NOTHING, ["end"]),
        (Ending.STOPPED, Next.NOTHING, ["end"]),
        (Ending.CANCELLED, Next.NOTHING, ["end"]),
        (Ending.STOPPED, Next.REQUEUE, []),
        (Ending.FAILED, Next.IN_PLACE, ["failure"]),
        (Ending.FAILED, Next.NOTHING, ["failure"]),
        (Ending.REFUSED, Next.NOTHING, ["failure"]),
        (Ending.FENCED, Next.NOTHING, []),
    ],
)
def test_an_end_that_the_cluster_or_the_user_brought_and_that_goes_on_is_no_event(
    ending: Ending, follows: Next, expected: list[str], run: RunDir
) -> None:
    of = notifier(run)

    of.notify_end(end(ending, follows))

    assert [(one["event"], one["next"]) for one in told(run, of)] == [(event, str(follows)) for event in expected]


def test_a_requeued_job_does_not_tell_the_start_again_and_a_new_submission_does(run: RunDir) -> None:
    write_queued_job(run, QueuedJob(job_id="7", attempt=0, at=0.0, since=0))
    for attempt in (0, 1):  # the second is that of the requeued job, with a supervisor of its own
        of = notifier(run, on_slurm=True)
        of.notify_start(attempt)
        of.wait_for_commands(goes_on=False)
    write_queued_job(run, QueuedJob(job_id="8", attempt=2, at=0.0, since=2))
    of = notifier(run, on_slurm=True)
    of.notify_start(2)

    assert [(one["event"], one["attempt"], one["job_id"]) for one in told(run, of)] == [
        ("start", "0", "7"),
        ("start", "2", "7"),
    ]


def test_an_attempt_after_a_supervisor_that_died_on_this_machine_is_no_new_start(run: RunDir) -> None:
    record_start(run, attempt=0, job_id="1")
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=-9, next=Next.IN_PLACE))
    of = notifier(run)

    of.notify_start(1)

    assert told(run, of) == []


def test_another_supervisor_after_one_that_died_tells_no_event_twice(run: RunDir) -> None:
    first, second = notifier(run), notifier(run)
    for of in (first, second):
        of.notify_end(end(Ending.FAILED))
        of.notify_silence(0, 450.0)
        of.notify_silence(0, 455.0)
        of.wait_for_commands(goes_on=False)

    assert sorted(one["event"] for one in told(run, second)) == ["failure", "no_progress"]


def test_the_first_save_of_an_attempt_that_fails_is_told_once(run: RunDir) -> None:
    of = notifier(run)
    for attempt, error in (
        (0, None),
        (0, "rank 1: no space"),
        (0, None),
        (0, "rank 1: no space"),
        (1, "rank 0: quota"),
    ):
        write_progress(run, Progress(attempt=attempt, step=5, save_error=error))
        of.notify_failed_save(attempt)
        of.notify_failed_save(attempt + 1)  # which has not reported yet

    found = sorted(told(run, of), key=lambda one: one["attempt"])  # the commands run beside each other

    assert [(one["event"], one["attempt"], one["step"]) for one in found] == [
        ("save_failed", "0", "5"),
        ("save_failed", "1", "5"),
    ]
    assert "rank 1: no space" in found[0]["reason"]


def test_a_reason_that_is_longer_than_a_variable_may_be_is_cut(run: RunDir) -> None:
    of = notifier(run)

    of.notify_end(Conclusion(attempt=0, end=End(ending=Ending.FAILED, reason="x" * 10**6 + "\0")))

    assert told(run, of)[0]["reason"] == "x" * 4000


def test_only_the_events_that_the_user_names_start_the_command(run: RunDir) -> None:
    of = notifier(run, on=("failure",))

    of.notify_start(0)
    of.notify_end(end(Ending.FINISHED))

    assert told(run, of) == []


def test_where_the_record_cannot_be_written_the_run_goes_on_without_the_command(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run.notified.mkdir()
    of = notifier(run)

    of.notify_start(0)

    assert told(run, of) == []
    assert "could not start `notify.command` for the event start" in capsys.readouterr().err


def test_a_job_that_goes_back_into_the_queue_waits_only_a_moment(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_hpc.job.notify.PATIENCE_S", 0.2)
    of = notifier(run, command=("sleep", "20"))
    of.notify_end(end(Ending.FAILED, Next.REQUEUE))
    began = time.monotonic()

    of.wait_for_commands(goes_on=True)

    assert time.monotonic() - began < 15
    for process in of._running:
        process.terminate()
        process.wait()
