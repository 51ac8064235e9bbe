"""A training whose two ranks run under a stand-in for nsys that keeps signals to itself: it stops, resumes, and has the same bits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.whole_runs import Workplace, make_workplace
from tests.fake_nsys import on_path

CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 48, load_s: 0.01}}
train: {epochs: 99, max_steps: 24, global_batch_size: 8, lr: 0.01}
checkpoint: {every_steps: 6}
resources: {workers_per_node: 2}
"""
ASKED = ["profile.kind=nsys", "profile.steps=[4,6]", "profile.ranks=[0,1]"]
pytestmark = pytest.mark.long


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left(run: RunDir) -> list[str]:
    """Return the commands of processes that still speak of this run."""
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(run.path) in line]


def supervisor(run: RunDir) -> psutil.Process:
    [one] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"ddp_hpc.job.node.agent", str(run.path)} <= set(process.info["cmdline"] or [])
    ]
    parent = one.parent()
    assert parent is not None
    return parent


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("runs of 100%h")
    (folder / "bin").mkdir()
    environ = {**os.environ, "PATH": on_path(folder / "bin"), "FAKE_NSYS": "between"}
    made = make_workplace(folder, CONFIG)
    made = Workplace(made.path, {**environ, "FAKE_NSYS_CALLS": str(folder / "calls")})
    made.finish("plain")
    return made


def test_a_stop_reaches_the_ranks_and_a_resume_ends_with_the_same_bits(place: Workplace) -> None:
    started = place.submit("stopped", *ASKED)
    run = place.run("stopped")
    assert started.returncode == 0, started.stderr
    wait_for(lambda: run.console.exists() and "committed" in run.console.read_text())

    supervisor(run).terminate()
    wait_for(lambda: left(run) == [])

    assert "stopped" in run.attempts.read_text()
    assert place.finish("stopped", *ASKED) == place.digest("plain")
    calls = [json.loads(line) for line in Path(place.environ["FAKE_NSYS_CALLS"]).read_text().splitlines()]
    reports = sorted(Path(call[call.index("-o") + 1]).name for call in calls)
    assert reports == [f"attempt-{attempt}.rank-{rank}.nsys-rep" for attempt in (0, 1) for rank in (0, 1)]
