"""A real MLflow server, which is away, dies, freezes and comes back: no training waits for it, and it gets each number once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddp_hpc.base import processes
from ddp_hpc.run.run_dir.paths import RunDir
from tests.adapters.test_recorders import (
    SLOW,
    followers_of,
    in_metrics,
    in_mlflow,
    newest_checkpoint,
    newest_line,
    send,
    without_rates,
)
from tests.distributed.test_leaving import until
from tests.distributed.whole_runs import Workplace, live_processes, make_workplace

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),  # MLflow's
]
CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 96}}
train: {epochs: 20, global_batch_size: 24, lr: 0.01, grad_clip_norm: 1.0}
checkpoint: {every_steps: 2}
log: {every_steps: 1, recorders: [mlflow]}
resources: {workers_per_node: 2}
"""
QUICK = ("recipe.args.load_s=0.02",)
NUM_STEPS = 80


class Server:
    """`mlflow server` with SQLite, on a port of this machine that was free."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.uri = f"http://127.0.0.1:{free.getsockname()[1]}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        argv = [sys.executable, "-m", "mlflow", "server", "--host=127.0.0.1", f"--port={self.uri.rpartition(':')[2]}"]
        argv += [f"--backend-store-uri=sqlite:///{self._folder / 'server.db'}", "--workers=1"]
        environ = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, cwd=self._folder, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        until(self._answers)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=5) as answer:  # noqa: S310  our own address
                return bool(answer.status == 200)
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to it and to all that it has started."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it, as a crash of its machine does."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    found = Server(folder)
    yield found
    found.kill()


@pytest.fixture
def place(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    return make_workplace(tmp_path / "work", CONFIG)


def goes_on(run: RunDir) -> None:
    """Wait until the training has logged three more steps."""
    before = newest_line(run)
    until(lambda: newest_line(run) >= before + 3)


def check_each_once(run: RunDir, server: Server) -> None:
    found, expected = in_mlflow(run, server.uri), without_rates(in_metrics(run))
    assert {step for _, step in expected} == {*range(1, NUM_STEPS + 1)}
    assert max(found.values()) == 1
    assert without_rates(found) == expected


def test_a_server_that_starts_late_dies_and_comes_back_has_each_number_of_a_killed_run_once(
    place: Workplace, server: Server
) -> None:
    run = place.run("patient")
    assert place.submit("patient", *SLOW).returncode == 0
    until(lambda: newest_line(run) >= 2)
    server.start()
    until(lambda: is_known(run, server))
    server.kill()
    goes_on(run)
    worker = live_processes(run)["worker"][0]

    def has_unsaved_steps() -> bool:
        """Tell whether a logged step is in no checkpoint; if so, the worker is suspended, and cannot commit one meanwhile."""
        worker.suspend()
        if newest_checkpoint(run) < newest_line(run):
            return True
        worker.resume()
        return False

    until(has_unsaved_steps)
    worker.kill()
    until(lambda: not processes.is_locked(run.lock))
    server.start()

    place.finish("patient", *QUICK)

    assert run.superseded_metrics.exists(), "no step was repeated, so this shows nothing"
    assert "has not sent all numbers" not in run.rank_log(1, 0).read_text()
    check_each_once(run, server)
    assert followers_of(run) == []


def is_known(run: RunDir, server: Server) -> bool:
    """Tell whether the server has a number of the run."""
    try:
        return len(in_mlflow(run, server.uri)) > 0
    except (AttributeError, ValueError):  # it has no such experiment, or no such run yet
        return False


@pytest.mark.parametrize("way", ["dies", "freezes"])
def test_a_server_that_fails_for_good_is_named_at_the_end_and_gets_the_rest_when_it_is_back(
    place: Workplace, server: Server, way: str
) -> None:
    run = place.run("alone")
    server.start()
    assert place.submit("alone", *SLOW).returncode == 0
    until(lambda: is_known(run, server))
    server.kill() if way == "dies" else server.signal(signal.SIGSTOP)
    goes_on(run)
    assert place.command("stop", "alone").returncode == 0
    until(lambda: not processes.is_locked(run.lock))

    place.finish("alone", *QUICK)

    log = run.rank_log(1, 0).read_text()
    assert "the recorder 'mlflow' has not sent all numbers" in log
    assert "ddp_hpc.train.recording.follower" in log
    assert followers_of(run) == []
    server.start() if way == "dies" else server.signal(signal.SIGCONT)
    assert [send(run, "mlflow").returncode for _ in range(2)] == [0, 0]
    check_each_once(run, server)
