"""Following a sweep: what is said of each point, and when it is over. It changes nothing. Slurm is shell scripts here."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.durable import append_json_line
from ddp_hpc.base.errors import RunBusyError
from ddp_hpc.cli.sweep_follow import _next_commands, follow_sweep, show_points
from ddp_hpc.launch.submission.allocate import submit_job_array
from ddp_hpc.launch.sweep import array
from ddp_hpc.launch.sweep.manage_sweep import cancel_sweep, continue_sweep
from ddp_hpc.launch.sweep.point_states import SweepStatus, follow_points
from ddp_hpc.launch.sweep.sweep_dir import SweepDir, lock_sending, read_sweep
from ddp_hpc.run.run_dir.ledger import End, Ending, Next, record_end
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, read_queued_job, write_queued_job
from ddp_hpc.watch.queue import FRESH_S
from tests.unit.test_sweep_array import DOWN, Lab, accepts, lose_answer, start


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_hpc.launch.submission.submit_checks.capacity.NODE_LOCAL_DIRS", ())


class Watched:
    """A sweep that is followed, and a clock that a test advances."""

    def __init__(self, lab: Lab, sweep_dir: SweepDir) -> None:
        self.lab, self.sweep_dir, self.now, self.paused = lab, sweep_dir, 4e9, 0.0
        self._looks = self._follow()
        self.out = io.StringIO()

    def _follow(self) -> Iterator[SweepStatus]:
        environ = {**self.lab.environ, "HOME": str(self.sweep_dir.path.parent)}
        return follow_points(self.sweep_dir, environ, clock=lambda: self.now, pause=self._pause)

    def _pause(self, seconds: float) -> None:
        self.paused = seconds

    def look(self, *, later_s: float = FRESH_S) -> SweepStatus:
        self.now += later_s
        return next(self._looks)

    def words(self, *, later_s: float = FRESH_S) -> list[str]:
        return [str(state.word) for state in self.look(later_s=later_s).states.values()]

    @property
    def runs(self) -> list[RunDir]:
        return [self.sweep_dir.run(point) for point in read_sweep(self.sweep_dir).points]


def begin(run: RunDir, job_id: str, *, at: float, attempt: int = 0) -> None:
    """Have a task on another host begin a run, or an attempt of it."""
    run.path.mkdir(exist_ok=True)
    run.config.write_text(f"name: {run.name}\n")
    write_queued_job(run, QueuedJob(job_id=job_id, attempt=0, at=at))
    begun = {"attempt": attempt, "job_id": job_id, "host": "node1", "pid": 1, "started_at": at, "cluster": "slurm"}
    append_json_line(run.attempts, begun)


def end(run: RunDir, ending: Ending, *, attempt: int = 0, follows: Next = Next.NOTHING, reason: str = "") -> None:
    record_end(run, attempt, End(ending=ending, exit_code=0, reason=reason, next=follows))


def test_points_beyond_a_limit_are_not_sent_by_who_follows_and_the_end_is_the_end_of_the_others(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=2)
    watched = Watched(lab, start(lab, tmp_path, "seed=0..3").sweep_dir)
    first, second, *_ = watched.runs
    lab.lists(*read_sweep(watched.sweep_dir).arrays)
    num_orders = len(lab.arrays)
    assert watched.words() == ["waiting", "waiting", "not submitted", "not submitted"]

    for number, run in enumerate((first, second)):
        begin(run, f"14_{number}", at=watched.now)
        end(run, Ending.FINISHED)
    lab.lists()
    lab.raise_limit(10)
    last = watched.look(later_s=10 * FRESH_S)

    assert [state.word for state in last.states.values()] == [*["finished"] * 2, *["not submitted"] * 2]
    assert last.is_over
    assert len(lab.arrays) == num_orders
    assert _next_commands({"finished": 2, "not submitted": 2}, "grid", is_cancelled=False)[1] == (
        "start the rest: ddp-hpc sweep continue grid"
    )


def test_a_sweep_whose_points_will_not_start_is_over_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..2").sweep_dir
    begin(sweep_dir.run(read_sweep(sweep_dir).points[2]), "14_2", at=1.0)
    end(sweep_dir.run(read_sweep(sweep_dir).points[2]), Ending.FINISHED)
    lab.lists(*read_sweep(sweep_dir).arrays)
    assert not Watched(lab, sweep_dir).look().is_over
    array = read_sweep(sweep_dir).arrays[0]
    lab.lists(replace(array, numbers=(0, 1)), why="PartitionTimeLimit")

    assert follow_sweep(sweep_dir, {**lab.environ, "HOME": str(tmp_path / "fresh")}, word="grid", is_quiet=True) == 1

    counts, why, *steps = capsys.readouterr().out.splitlines()
    assert counts == "3 points: 1 finished, 2 waiting"
    assert why.startswith("2 of the points never start: the job's time limit is longer than its partition allows")
    assert steps[-1] == "cancel what waits: ddp-hpc sweep cancel grid"


def test_a_point_that_a_user_has_cancelled_is_not_sent_and_its_sweep_ends(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    watched = Watched(lab, start(lab, tmp_path, "seed=0..1").sweep_dir)
    lab.lists()

    assert watched.words() == ["waiting", "waiting"], "one answer of squeue may be older than the array"
    last = watched.look()

    assert [state.word for state in last.states.values()] == ["not submitted", "not submitted"]
    assert last.is_over
    assert len(lab.arrays) == 1


def test_cancelling_a_sweep_counts_and_records_the_points_that_wait_after_a_requeue(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    requeued = sweep_dir.run(read_sweep(sweep_dir).points[0])
    begin(requeued, "14_0", at=1.0)
    end(requeued, Ending.STOPPED, follows=Next.REQUEUE)
    lab.lists(*read_sweep(sweep_dir).arrays)
    gone = tmp_path / "gone"
    shown = (
        "JobId=20 ArrayJobId=14 ArrayTaskId=0 JobName=x UserId=ada(1) JobState=$state Reason=None Restarts=1 Command=x"
    )
    lab.has("scontrol", f'state=PENDING; [ -e {gone} ] && state=CANCELLED; echo "{shown}"')
    lab.has("scancel", f"touch {gone}")

    assert cancel_sweep(sweep_dir, lab.environ) == 1

    queued = read_queued_job(requeued)
    assert queued is not None
    assert queued.cancelled_at is not None
    assert len(lab.orders("scancel")) == 2


def test_a_point_that_the_user_has_submitted_alone_is_not_sent_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=1)
    sweep_dir = start(lab, tmp_path, "seed=0..2").sweep_dir
    begin(sweep_dir.run(read_sweep(sweep_dir).points[1]), "70", at=1.0)
    lab.lists(*read_sweep(sweep_dir).arrays, alone="70")
    lab.raise_limit(10)

    assert continue_sweep(sweep_dir, lab.environ, limits={}).numbers == [2]


def test_nobody_else_sends_points_of_a_sweep_while_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    submit = submit_job_array

    def another_process_sends_first(script: Path, *args: Any, **more: Any) -> str:
        with pytest.raises(RunBusyError, match="Another process is submitting points"):
            continue_sweep(SweepDir(script.parent), lab.environ, limits={})
        return submit(script, *args, **more)

    monkeypatch.setattr(array, "submit_job_array", another_process_sends_first)

    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir

    assert lab.arrays == ["--array=0-1 0"]
    assert not processes.is_locked(sweep_dir.ledger)


def test_a_cancellation_says_so_where_another_process_goes_on_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    sweep_dir = start(lab, tmp_path, "seed=0..1").sweep_dir
    monkeypatch.setattr("ddp_hpc.launch.sweep.manage_sweep._SENDING_PATIENCE_S", 0.0)

    with lock_sending(sweep_dir, "busy"), pytest.raises(RunBusyError, match=r"sweep cancel \S+grid` again"):
        cancel_sweep(sweep_dir, lab.environ)

    assert read_sweep(sweep_dir).is_cancelled


def test_who_follows_a_sweep_that_another_process_submits_does_not_take_it_for_over(tmp_path: Path) -> None:
    lab = Lab(tmp_path, limit=0)
    watched = Watched(lab, start(lab, tmp_path, "seed=0..1").sweep_dir)

    with lock_sending(watched.sweep_dir, "busy"):
        assert not watched.look().is_over

    assert watched.look().is_over


def test_a_slurm_that_does_not_answer_ends_nothing(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lost = Watched(lab, lose_answer(lab, tmp_path))
    look = lost.look()
    assert [state.word for state in look.states.values()] == ["unknown"] * 4
    assert look.is_over, "`sweep continue` finds out"
    lost = Watched(lab, lost.sweep_dir)
    accepts(lab, tmp_path)
    lab.lists()
    continue_sweep(lost.sweep_dir, lab.environ, limits={})
    lab.has("squeue", DOWN)

    looks = [lost.look(later_s=300.0) for _ in range(3)]

    assert {state.word for look in looks for state in look.states.values()} == {"unknown"}
    assert looks[0].problem
    assert not looks[-1].is_over


def test_each_change_of_a_point_is_a_line_and_the_counts_follow(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    watched = Watched(lab, start(lab, tmp_path, "seed=0..2").sweep_dir)
    first, second, third = watched.runs
    (array,) = read_sweep(watched.sweep_dir).arrays
    lab.lists(array)

    def steps() -> Iterator[SweepStatus]:
        yield watched.look()
        begin(first, "14_0", at=watched.now)
        yield watched.look(later_s=1)
        end(first, Ending.STOPPED, follows=Next.REQUEUE, reason="preempted")
        yield watched.look(later_s=1)
        begin(first, "14_0", at=watched.now, attempt=1)
        yield watched.look(later_s=1)
        begin(second, "14_1", at=watched.now)
        end(second, Ending.FAILED, reason="it broke")
        yield watched.look(later_s=1)
        end(first, Ending.FINISHED, attempt=1)
        lab.lists()
        yield watched.look(later_s=1)
        yield watched.look()
        yield watched.look()

    last = show_points(steps(), watched.out, is_quiet=False)

    assert last.is_over
    assert watched.out.getvalue().splitlines() == [
        "3 points: 3 waiting",
        "000-seed-0 begun",
        "3 points: 1 starting, 2 waiting",
        "000-seed-0 requeued: preempted",
        "3 points: 3 waiting",
        "000-seed-0 begun again, attempt 1",
        "3 points: 1 starting, 2 waiting",
        "001-seed-1 failed: it broke",
        "3 points: 1 failed, 1 starting, 1 waiting",
        "000-seed-0 finished",
        "3 points: 1 failed, 1 finished, 1 waiting",
        "002-seed-2 not submitted: its job left the queue before it began",
        "3 points: 1 failed, 1 finished, 1 not submitted",
    ]
    assert not third.path.exists()
