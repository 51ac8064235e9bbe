"""A worker under a stand-in for nsys: what nsys does changes neither the worker's end nor what is left running.

The real program is in tests/distributed/test_nsys.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ddp_hpc.errors import ConfigError
from ddp_hpc.nsys import Profiler, Session
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.spec import RunSpec
from ddp_hpc.spec.training import ProfileSpec
from ddp_hpc.submission.run_dir_setup import refuse_missing_nsys

FAKE = Path(__file__).parents[1] / "fake_nsys.py"
QUICK = """
import os, sys
from pathlib import Path
from ddp_hpc.base import processes
from ddp_hpc.job.node.under_nsys import Front, Worker
from ddp_hpc.nsys import Session
from ddp_hpc.run_dir.paths import RunDir
processes.block_awaited_signals()
run = RunDir(Path(sys.argv[1]))
worker = Worker(run=run, module="tests.unit.nsys_worker", attempt=0, rank=0, environ={**os.environ}, listen_fd=None)
front = Front(Session(sys.argv[2], "one", run.nsys_report(0, 0)), worker, start_s=0.5, report_s={0: 0.5})
try:
    print("result", front.see_through())
finally:
    front.close()
"""
"""A front that waits for nsys for a shorter time than a run would."""


@dataclass
class Place:
    """A run's directory, and where the stand-in for nsys notes its calls."""

    run: RunDir
    folder: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, trial: str, how: str = "", command: str = str(FAKE)) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "ddp_hpc.job.node.spawned", str(self.run.path), "--worker=tests.unit.nsys_worker"]
        mine = next(iter(os.sched_getaffinity(0)))
        options = ["--attempt=0", f"--agent={os.getpid()}", f"--cpus={mine}", f"--nsys=0:{command}"]
        return self._popen([*argv, *options], trial, how)

    def start_quick(self, trial: str, how: str) -> subprocess.Popen[str]:
        return self._popen([sys.executable, "-c", QUICK, str(self.run.path), str(FAKE)], trial, how)

    def _popen(self, argv: list[str], trial: str, how: str) -> subprocess.Popen[str]:
        environ = {**os.environ, "TRIAL": trial, "FAKE_NSYS": how, "FAKE_NSYS_FOLDER": str(self.folder), "RANK": "0"}
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
        popen = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.started.append(popen)
        return popen

    @property
    def worker_pid(self) -> int:
        path = self.run.path / "worker.pid"
        wait_for(lambda: path.exists() and bool(path.read_text()))
        return int(path.read_text())

    @property
    def verbs(self) -> list[str]:
        return [json.loads(line)[0] for line in (self.folder / "calls").read_text().splitlines()]

    def left(self) -> list[str]:
        """Return the processes that belong to this place and still run."""
        found = []
        for process in psutil.process_iter(["environ", "status", "cmdline"]):
            environ = process.info["environ"] or {}
            if environ.get("FAKE_NSYS_FOLDER") == str(self.folder) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.info["cmdline"] or []))
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    one = Place(RunDir(tmp_path / "run %h"), tmp_path / "nsys")
    one.run.path.mkdir()
    one.folder.mkdir()
    yield one
    for process in psutil.process_iter(["environ"]):
        if (process.info["environ"] or {}).get("FAKE_NSYS_FOLDER") == str(one.folder):
            process.kill()
    for popen in one.started:
        popen.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("trial", "how", "code"),
    [
        pytest.param("exit 0", "other_code", 0, marks=pytest.mark.long),
        pytest.param("exit 1", "", 1, marks=pytest.mark.long),
        ("exit 99", "dies", 99),
        ("exit 255", "", 255),
        pytest.param("signal 9", "", -9, marks=pytest.mark.long),
        ("signal 11", "other_code", -11),
    ],
)
def test_a_rank_ends_as_its_worker_whatever_nsys_does_and_leaves_no_process(
    trial: str, how: str, code: int, place: Place
) -> None:
    front = place.start(trial, how)
    said, _ = front.communicate(timeout=30)

    assert front.returncode == code, said
    assert "worker: under nsys" in said
    assert place.verbs == ["launch"]
    assert place.left() == []


def test_a_report_lies_in_the_run_directory_by_its_true_name(place: Place) -> None:
    said, _ = place.start("record").communicate(timeout=30)

    assert "worker: begun" in said
    assert place.verbs == ["launch", "start", "stop"]
    report = place.run.path / "profile/attempt-0.rank-0.nsys-rep"
    assert report.read_text() == "a report"
    assert f"note: nsys has written its report of rank 0: {report}" in said
    assert place.run.nsys_reports() == [report]


@pytest.mark.parametrize(
    ("how", "command", "said"),
    [
        ("fails", str(FAKE), 'ended with exit code 1 before it had started the worker. Its last line: "nsys: Failed'),
        ("", "/nowhere/nsys", "there is no program '/nowhere/nsys' on the PATH"),
    ],
)
def test_where_nsys_cannot_start_the_worker_runs_without_it(how: str, command: str, said: str, place: Place) -> None:
    front = place.start("exit 99", how, command)
    printed, _ = front.communicate(timeout=30)

    assert front.returncode == 99
    assert "warning: rank 0 runs without a profile: " in printed
    assert said in printed.partition("worker: ")[2], "the worker's log says it, too"


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "said"),
    [("start_fails", "nsys ended with exit code 1. Its last line: 'The timer was not found.'"), ("no_report", "begun")],
)
def test_a_record_that_does_not_come_about_is_said_and_changes_no_exit_code(how: str, said: str, place: Place) -> None:
    front = place.start("record", how)
    printed, _ = front.communicate(timeout=30)

    assert front.returncode == 0
    assert f"worker: {said}" in printed
    assert ("nsys has left no report of rank 0" in printed) == (how == "no_report")
    assert place.run.nsys_reports() == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "result"), [("hangs", "has not started the worker within 0 s"), ("never_ends", "result 0")]
)
def test_an_nsys_that_hangs_and_ignores_signals_is_killed(how: str, result: str, place: Place) -> None:
    said, _ = place.start_quick("exit 0", how).communicate(timeout=30)

    assert result in said
    assert place.left() == []


def test_a_stop_signal_reaches_the_worker_and_not_nsys(place: Place) -> None:
    front = place.start("await")
    worker = place.worker_pid
    nsys = int((place.folder / "nsys.pid").read_text())
    os.kill(nsys, signal.SIGTERM)  # as Slurm does, to every process of a step
    os.kill(front.pid, signal.SIGUSR2)
    said, _ = front.communicate(timeout=30)

    assert front.returncode == 99
    assert "worker got SIGUSR2" in said
    assert worker != front.pid
    assert place.left() == []


@pytest.mark.parametrize("how", [pytest.param("", marks=pytest.mark.long), "never_ends"])
def test_a_worker_and_all_of_nsys_die_with_the_process_that_stands_for_it(how: str, place: Place) -> None:
    front = place.start("sleep", how)
    worker = psutil.Process(place.worker_pid)

    front.kill()

    psutil.wait_procs([worker], timeout=10)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    front.communicate(timeout=30)
    wait_for(lambda: place.left() == [])


@pytest.mark.long
def test_a_worker_that_is_killed_from_outside_counts_as_killed(place: Place) -> None:
    front = place.start("sleep")

    os.kill(place.worker_pid, signal.SIGKILL)
    front.communicate(timeout=30)

    assert front.returncode == -signal.SIGKILL


def test_the_commands_of_nsys() -> None:
    session = Session("/opt/nsys", "s", Path("/runs/50%/profile/attempt-0.rank-1.nsys-rep"))

    launched = session.launch_argv(["python", "-m", "x"], "/dev/fd/7")

    assert launched[:5] == ["/opt/nsys", "launch", "--session-new=s", "--trace=cuda,nvtx,osrt", "--wait=primary"]
    assert launched[5:7] == ["/bin/sh", "-c"]
    assert launched[8:] == ["sh", "/dev/fd/7", "python", "-m", "x"]
    assert session.start_argv() == [
        "/opt/nsys",
        "start",
        "--session=s",
        "--sample=none",
        "--cpuctxsw=none",
        "--force-overwrite=true",
        "--output=/runs/50%%/profile/attempt-0.rank-1.nsys-rep",
    ]
    assert session.stop_argv() == ["/opt/nsys", "stop", "--session=s"]


@pytest.mark.parametrize("text", ["0:nsys", "0,3,12:/opt/nsight systems/nsys:2"])
def test_what_is_asked_for_goes_through_a_command_line(text: str) -> None:
    assert str(Profiler.parse(text)) == text


def test_a_run_on_this_machine_without_nsys_is_refused_before_it_starts() -> None:
    asked = RunSpec(name="a", profile=ProfileSpec(kind="nsys"))

    with pytest.raises(ConfigError, match=r"no program 'nsys' on this machine's PATH.*profile\.command"):
        refuse_missing_nsys(asked, {"PATH": "/nowhere"})
    refuse_missing_nsys(RunSpec(name="a"), {"PATH": "/nowhere"})
    refuse_missing_nsys(RunSpec(name="a", profile=ProfileSpec(kind="nsys", command=str(FAKE))), {"PATH": "/nowhere"})
