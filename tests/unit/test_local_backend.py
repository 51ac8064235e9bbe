"""Which process of a run on this machine is whose."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.durable import append_json_line
from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.cli import main
from ddp_hpc.launch.submission import local
from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from tests.full_disk import no_file_larger_than
from tests.made_run import add_progress, make_run


@pytest.fixture
def held(tmp_path: Path) -> Iterator[RunDir]:
    """Return a run that somebody works on."""
    run = make_run(tmp_path)
    fd = processes.take_lock(run.lock)
    assert fd is not None
    yield run
    os.close(fd)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def add(run: RunDir, *, host: str, pid: int, pid_start: int | None) -> None:
    known = {"attempt": 0, "job_id": "1", "host": host, "pid": pid, "pid_start": pid_start, "started_at": 1.0}
    append_json_line(run.attempts, known)


def test_a_run_of_another_host_is_not_cancelled_by_killing_a_process_of_that_number_here(
    held: RunDir, stranger: subprocess.Popen[bytes]
) -> None:
    add(held, host="elsewhere", pid=stranger.pid, pid_start=None)

    with pytest.raises(ConfigError, match=r"it runs on elsewhere \(process \d+\). Cancel it there"):
        local.cancel(held, os.environ)

    assert stranger.poll() is None
    assert Ledger.read(held).attempts[0].ending is None


def test_a_process_that_has_the_number_of_a_dead_supervisor_is_not_killed(
    held: RunDir, stranger: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "PROCESS_EXIT_PATIENCE_S", 0.2)
    start = processes.start_ticks(stranger.pid)
    assert start is not None
    add(held, host=socket.gethostname(), pid=stranger.pid, pid_start=start - 1)

    local.cancel(held, os.environ)

    assert stranger.poll() is None
    assert Ledger.read(held).attempts[0].ending == "cancelled"


@pytest.fixture
def guarded() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield what looks like a guardian, and the pid of its child."""
    sleep = "import time; time.sleep(600)"
    program = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}]).pid, flush=True); {sleep}"
    )
    argv = [sys.executable, "-c", program, "ddp_hpc.job.guardian"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as guardian:
        assert guardian.stdout is not None
        pid = int(guardian.stdout.readline())
        yield guardian, pid
        processes.kill([pid])
        guardian.kill()


def test_on_a_full_disk_a_cancelled_run_is_killed_with_what_would_start_it_again(
    held: RunDir, guarded: tuple[subprocess.Popen[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    guardian, pid = guarded
    add(held, host=socket.gethostname(), pid=pid, pid_start=processes.start_ticks(pid))
    supervisor = psutil.Process(pid)

    with no_file_larger_than(0):
        code = main(["cancel", str(held.path)])

    assert code == 1
    said = capsys.readouterr().err
    assert "was killed, but that the user cancelled it could not be written to" in said
    assert "File too large" in said
    assert guardian.wait(30) == -signal.SIGKILL
    supervisor.wait(30)


def test_on_a_full_disk_the_other_runs_are_cancelled_too(
    held: RunDir, guarded: tuple[subprocess.Popen[str], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, pid = guarded
    add(held, host=socket.gethostname(), pid=pid, pid_start=processes.start_ticks(pid))
    other = make_run(tmp_path / "other")

    with no_file_larger_than(0):
        main(["cancel", str(held.path), str(other.path)])

    first, second = capsys.readouterr().err.splitlines()
    assert "was killed, but" in first
    assert "is not running" in second


def test_a_run_that_has_ended_between_two_looks_as_it_was_asked_to_gets_time_to_exit(
    held: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_start(held, attempt=0, job_id="1")
    held.stop_request.touch()
    read = Ledger.read

    def ends_after(run: RunDir) -> Ledger:
        """Read the ledger; then the supervisor records the end, and removes the request that it obeyed."""
        seen = read(run)
        record_end(run, 0, End(ending=Ending.STOPPED, exit_code=0))
        run.stop_request.unlink(missing_ok=True)
        return seen

    monkeypatch.setattr(Ledger, "read", ends_after)

    assert local._exit_patience_s(held) > 0


def test_a_supervisor_that_is_gone_before_training_is_missed_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    add(run, host=socket.gethostname(), pid=dead.pid, pid_start=1)

    with pytest.raises(WorkerError, match="the ddp-hpc processes that watched the workers were killed"):
        local._await_training(run, 0, dead)  # it would wait for two minutes


@pytest.mark.parametrize("name", ["attempts", "progress"])
def test_a_submission_waits_for_a_record_that_cannot_be_read_for_a_moment(
    name: str, tmp_path: Path, stranger: subprocess.Popen[bytes]
) -> None:
    """A link that leads to itself stands for a server that restarts: what is there is not known."""
    run = make_run(tmp_path)
    add(run, host=socket.gethostname(), pid=stranger.pid, pid_start=processes.start_ticks(stranger.pid))
    add_progress(run)
    record: Path = getattr(run, name)
    kept = record.rename(tmp_path / "kept")
    record.symlink_to(record.name)
    server = threading.Timer(0.2, lambda: kept.replace(record))

    server.start()
    ended = local._await_training(run, 0, stranger)
    server.join()

    assert ended is None  # it trains


def test_a_guardian_outlives_a_strict_python_without_a_warning() -> None:
    program = """
import subprocess, sys
from ddp_hpc.launch.submission import local
quiet = subprocess.DEVNULL
process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=int(sys.argv[1]), stdout=quiet, stderr=quiet)
local.let_outlive(process)
print(process.poll())
"""
    read, write = os.pipe()
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program, str(read)],
            pass_fds=[read],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        os.close(read)
        os.close(write)

    assert (done.stdout, done.stderr) == ("None\n", "")
