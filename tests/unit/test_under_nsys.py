"""A rank that a stand-in for nsys starts: the command, the exit code, the stop signal, and the end together with nsys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.job.node.under_nsys import parse_ranks, profile_argv
from ddp_hpc.launch.submission.run_dir_setup import refuse_missing_nsys
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.spec.training import ProfileSpec
from tests.fake_nsys import on_path

WORKER = """
import os, signal, sys
from pathlib import Path
def preload(run_path):
    return ""
def main(run_path, environ, *, attempt, listen_fd):
    Path(run_path, "pid").write_text(str(os.getpid()))
    if environ["TRIAL"] == "await":
        print("worker got", signal.sigwait({signal.SIGUSR2}).name)
        return 99
    return int(environ["TRIAL"])
"""


@dataclass
class Place:
    """A run's directory, and a stand-in for nsys."""

    run: RunDir
    path: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, trial: str, how: str = "", *, ranks: str = "0") -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "ddp_hpc.job.node.spawned_worker", str(self.run.path), "--worker=nsys_worker"]
        options = ["--attempt=2", f"--agent={os.getpid()}", f"--nsys={ranks}"]
        environ = {**os.environ, "TRIAL": trial, "FAKE_NSYS": how, "FAKE_NSYS_CALLS": str(self.calls_file), "RANK": "0"}
        environ |= {"PATH": self.path, "PYTHONPATH": f"{self.run.path.parent}:{Path(__file__).parents[2]}"}
        popen = subprocess.Popen(
            [*argv, *options], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.started.append(popen)
        return popen

    @property
    def calls_file(self) -> Path:
        return self.run.path.parent / "calls"

    @property
    def worker_pid(self) -> int:
        path = self.run.path / "pid"
        wait_for(lambda: path.exists() and bool(path.read_text()))
        return int(path.read_text())


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "nsys_worker.py").write_text(WORKER)
    (tmp_path / "bin").mkdir()
    one = Place(RunDir(tmp_path / "run %h"), on_path(tmp_path / "bin"))
    one.run.path.mkdir()
    yield one
    for popen in one.started:
        popen.kill()
        popen.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("how", ["", "between"])
def test_nsys_starts_a_chosen_rank_and_its_exit_code_is_that_of_the_rank(how: str, place: Place) -> None:
    started = place.start("99", how)
    said, _ = started.communicate(timeout=30)

    assert started.returncode == 99, said
    [call] = map(json.loads, place.calls_file.read_text().splitlines())
    report = place.run.path / "profile/attempt-2.rank-0.nsys-rep"
    assert call[call.index("-o") + 1] == str(report).replace("%", "%%")
    assert report.parent.is_dir()
    assert call[-1] == f"--under-nsys={started.pid}"


def test_a_stop_signal_reaches_the_rank(place: Place) -> None:
    started = place.start("await")

    assert place.worker_pid == started.pid
    processes.request_stop([started.pid])
    said, _ = started.communicate(timeout=30)

    assert "worker got SIGUSR2" in said
    assert started.returncode == 99


def test_a_rank_ends_when_nsys_is_killed(place: Place) -> None:
    started = place.start("await", "between")
    worker = psutil.Process(place.worker_pid)
    assert worker.pid != started.pid

    started.kill()

    worker.wait(timeout=30)


@pytest.mark.parametrize(("path", "ranks"), [("/nowhere", "0"), (None, "1,3")])
def test_a_rank_that_is_not_chosen_or_has_no_nsys_runs_without_it(path: str | None, ranks: str, place: Place) -> None:
    place.path = path or place.path
    started = place.start("99", ranks=ranks)
    said, _ = started.communicate(timeout=30)

    assert started.returncode == 99, said
    assert not place.calls_file.exists()


def test_the_command() -> None:
    argv = profile_argv("/opt/nsys", Path("/runs/50%/attempt-0.rank-1.nsys-rep"), ["python", "-m", "x"])

    assert argv == [
        "/opt/nsys",
        "profile",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--wait=primary",
        "--force-overwrite=true",
        "-o",
        "/runs/50%%/attempt-0.rank-1.nsys-rep",
        "python",
        "-m",
        "x",
    ]
    assert parse_ranks("0,3,12") == {0, 3, 12}


def test_a_run_on_this_machine_without_nsys_is_refused_before_it_starts(place: Place) -> None:
    asked = RunSpec(name="a", profile=ProfileSpec(kind="nsys"))

    with pytest.raises(ConfigError, match=r"no program 'nsys' on this machine's PATH.*env\.PATH"):
        refuse_missing_nsys(asked, {"PATH": "/nowhere"})
    refuse_missing_nsys(RunSpec(name="a"), {"PATH": "/nowhere"})
    refuse_missing_nsys(asked, {"PATH": place.path})
