"""Commands where a file can be opened but not read, where the file system has no locks, and where the shell's directory is gone."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import BinaryIO, cast

import pytest

from ddp_hpc.base import durable, patience, processes
from ddp_hpc.base.durable import open_record, read_json_lines, record_bytes
from ddp_hpc.cli import main
from ddp_hpc.launch.submission import local, slurm
from ddp_hpc.launch.sweep.points import make_points, parse_axis
from ddp_hpc.launch.sweep.sweep_dir import Sweep, SweepDir, make_sweep, read_sweep
from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, write_queued_job
from ddp_hpc.watch import logs
from ddp_hpc.watch.logs import LogSelection, read_lines
from tests.made_run import add_attempt, add_progress, make_run

UNREADABLE = "/proc/self/mem"
"""A file that can be opened, and whose first byte cannot be read: read(2) answers EIO, as on a mount that recovers."""


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "runs")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def make_unreadable(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(UNREADABLE)


# --- read(2) fails -------------------------------------------------------------------------------------------------------


def test_a_record_that_can_be_opened_but_not_read_is_named_and_ends_no_command_in_a_traceback(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    add_attempt(run)
    make_unreadable(run.progress)

    assert main(["status", str(run.path)]) == 1

    assert f"error: {run.progress} cannot be used: Input/output error" in capsys.readouterr().err
    make_unreadable(run.metrics)
    with pytest.raises(OSError, match="Input/output error") as found:
        list(read_json_lines(run.metrics))
    assert found.value.filename == str(run.metrics)


class Stale(BytesIO):
    """An open file that another node has replaced."""

    def read(self, *_: object) -> bytes:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("num_stale", [1, 2])
def test_a_record_that_is_replaced_while_it_is_read_is_opened_once_more(
    num_stale: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "progress.json"
    path.write_bytes(b"{}")
    opened: list[Path] = []

    def opens(asked: Path, *, most_bytes: int | None = None) -> BinaryIO:
        opened.append(asked)
        return cast("BinaryIO", Stale()) if len(opened) <= num_stale else open_record(asked, most_bytes=most_bytes)

    monkeypatch.setattr(durable, "open_record", opens)

    if num_stale == 1:
        assert record_bytes(path) == b"{}"
    else:
        with pytest.raises(OSError, match="Stale file handle") as found:
            record_bytes(path)
        assert found.value.filename == str(path)
    assert opened == [path] * 2


def test_logs_wait_while_a_log_cannot_be_read_and_print_each_line_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"line {number}" for number in range(2500)]
    run.console.parent.mkdir(exist_ok=True)
    run.console.write_text("\n".join(lines) + "\n")
    num_opened = 0

    class Failing(BufferedReader):
        def readline(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 5000:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readline(size)

    def opens(path: Path) -> BinaryIO:
        nonlocal num_opened
        num_opened += 1
        return Failing(path.open("rb", buffering=0)) if num_opened % 2 == 0 else open_record(path)

    monkeypatch.setattr(logs, "open_record", opens)
    monkeypatch.setattr(logs, "_MOST_BYTES", 10_000)
    monkeypatch.setattr(patience, "_FIRST_PAUSE_S", 0.01)

    assert list(read_lines(run, LogSelection())) == lines
    assert num_opened == 7  # three reads, one that finds nothing more, and three that failed


def test_of_several_runs_one_whose_record_cannot_be_read_keeps_no_other_from_being_cancelled(
    tmp_path: Path,
    sleeper: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (make_run(tmp_path / "runs", name) for name in ("first", "second"))
    write_queued_job(first, QueuedJob(job_id="7", attempt=0, at=1.0))
    monkeypatch.setattr(
        "ddp_hpc.cli.verbs.cancel.chosen_own_run", lambda _, __, name: {"first": first, "second": second}[name]
    )
    make_unreadable(first.submission)
    monkeypatch.setattr(processes, "is_locked", lambda path: path == second.lock and sleeper.poll() is None)
    durable.append_json_line(second.attempts, begun_by(sleeper))

    assert main(["cancel", "first", "second"]) == 1

    assert sleeper.wait(30) == -signal.SIGKILL
    captured = capsys.readouterr()
    assert "second was cancelled" in captured.out
    assert "Input/output error" in captured.err


def begun_by(process: subprocess.Popen[bytes], number: int = 0) -> dict[str, object]:
    """Return the start of an attempt whose supervisor is this process."""
    return {
        "attempt": number,
        "job_id": "1",
        "host": processes.host_name(),
        "pid": process.pid,
        "started_at": 1.0,
        "cluster": "local",
    }


# --- sweeps on this machine ----------------------------------------------------------------------------------------------


@pytest.fixture
def sweep_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepDir:
    """Return a sweep of two points, of which none has begun."""
    monkeypatch.chdir(tmp_path)
    made = SweepDir(tmp_path / "runs" / "grid")
    base = resolve(None, ["name=grid"], {}, command=["python", "train.py"])
    make_sweep(Sweep(dir=made, points=make_points([parse_axis("seed=0..1")]), backend="local"), base)
    return made


def test_cancelling_a_sweep_waits_for_the_point_that_is_just_being_started(
    sweep_dir: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runner_fd = processes.take_lock(sweep_dir.ledger)
    assert runner_fd is not None
    run = sweep_dir.run(read_sweep(sweep_dir).points[0])
    run.path.mkdir()
    run.config.write_text("name: x\n")  # it has begun, and no process has its lock yet
    looks: list[str] = []

    def find_job(one: RunDir, _environ: object) -> object:
        looks.append(one.name)
        return object() if len(looks) == 3 else None

    def cancel(one: RunDir, _environ: object) -> str:
        processes.release_lock(runner_fd)  # the command that runs the points sees the end of its point, and ends
        return one.name

    monkeypatch.setattr(local, "find_job", find_job)
    monkeypatch.setattr(local, "cancel", cancel)

    assert main(["sweep", "cancel", "grid"]) == 0

    assert len(looks) == 3
    assert read_sweep(sweep_dir).is_cancelled
    assert "1 " in capsys.readouterr().out


def test_cancelling_a_sweep_says_so_where_the_command_that_runs_its_points_does_not_end(
    sweep_dir: SweepDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ddp_hpc.launch.sweep.manage_sweep._RUNNER_PATIENCE_S", 0.3)
    runner_fd = processes.take_lock(sweep_dir.ledger)
    assert runner_fd is not None

    assert main(["sweep", "cancel", "grid"]) != 0

    processes.release_lock(runner_fd)
    assert "has not ended within" in capsys.readouterr().err


# --- no locks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK])
def _without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(_fd: int, _operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.usefixtures("_without_locks")
def test_without_locks_a_run_is_stopped_and_cancelled_by_its_ledger(
    run: RunDir, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run.lock.touch()
    durable.append_json_line(run.attempts, begun_by(sleeper))

    assert main(["stop", str(run.path)]) == 0
    assert main(["cancel", str(run.path)]) == 0

    assert sleeper.wait(30) == -signal.SIGKILL
    newest = Ledger.read(run).newest
    assert newest is not None
    assert str(newest.ending) == "cancelled"
    capsys.readouterr()
    assert main(["stop", str(run.path)]) == 2
    assert "is not running" in capsys.readouterr().err


@pytest.mark.usefixtures("_without_locks")
def test_without_locks_a_sweep_whose_points_have_ended_is_deleted_and_one_that_runs_is_not(
    sweep_dir: SweepDir, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    run = sweep_dir.run(read_sweep(sweep_dir).points[0])
    run.path.mkdir()
    run.config.write_text(f"name: {run.name}\n")
    run.lock.touch()
    durable.append_json_line(run.attempts, begun_by(sleeper))

    assert main(["delete", "grid", "--yes"]) != 0
    assert "runs on this machine" in capsys.readouterr().err
    sleeper.kill()
    sleeper.wait()
    assert main(["delete", "grid", "--yes"]) == 0

    assert not sweep_dir.path.exists()


# --- a directory that is gone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["status", "{run}"], 0, "digits"),
        (["report", "{run}", "-o", "{run}/report.html"], 0, "report.html"),
        (["submit", f"{EXAMPLES}/digits.yaml", "--dry-run"], 1, "The directory that this shell is in was deleted"),
    ],
)
def test_in_a_deleted_directory_commands_work_by_absolute_paths_or_say_what_is_gone(
    words: list[str], code: int, said: str, run: RunDir, tmp_path: Path
) -> None:
    add_attempt(run)
    add_progress(run)
    gone = tmp_path / "gone"
    gone.mkdir()
    argv = [sys.executable, "-m", "ddp_hpc", *(word.format(run=run.path) for word in words)]
    script = f'rmdir {gone}; exec "$@"'

    done = subprocess.run(
        ["sh", "-c", script, "sh", *argv], cwd=gone, capture_output=True, text=True, check=False, timeout=120
    )

    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_wait_for_slurm_reads_the_number_of_the_job_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    job = QueuedJob(job_id="7", attempt=0, at=0.0, since=0, backend="slurm")
    answers: list[OSError | QueuedJob] = [OSError(errno.EIO, os.strerror(errno.EIO)), job]

    def read(_: RunDir) -> QueuedJob:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(slurm, "read_queued_job", read)
    record_start(run, attempt=0, job_id="7")
    record_end(run, 0, End(ending=Ending.FINISHED, exit_code=0))

    assert slurm.wait(run, 0, {}).ending == Ending.FINISHED
    assert not answers
