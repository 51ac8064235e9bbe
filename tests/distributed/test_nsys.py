"""The real Nsight Systems, where this machine has it: the training is the same to the bit, also after a stop and a kill.

Without nsys on the PATH, $DDP_HPC_NSYS names it. `tests/unit/test_under_nsys.py` has the ways in which nsys may fail.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable

import psutil
import pytest

from ddp_hpc.run_dir.paths import RunDir
from tests.distributed.whole_runs import Workplace, make_workplace

CONFIG = """
recipe: {target: "trial_recipe:build", args: {num_samples: 48, load_s: 0.01}}
train: {epochs: 99, max_steps: 24, global_batch_size: 8, lr: 0.01}
checkpoint: {every_steps: 6}
resources: {workers_per_node: 2}
"""
NSYS = os.environ.get("DDP_HPC_NSYS") or shutil.which("nsys") or ""
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not NSYS, reason="Nsight Systems is not on the PATH, and DDP_HPC_NSYS does not name it"),
]


def asked(steps: str, ranks: str = "[0]") -> list[str]:
    return ["profile.kind=nsys", f"profile.command={NSYS}", f"profile.steps={steps}", f"profile.ranks={ranks}"]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def worker_under_nsys(run: RunDir) -> psutil.Process | None:
    """Return the worker's own process, which nsys has started."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(run.path) in words and words[1:3] == ["-m", "ddp_hpc.job.node.spawned"]:
            return process
    return None


def left(run: RunDir) -> list[str]:
    """Return the commands of processes that still speak of this run."""
    lines = (" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [line for line in lines if str(run.path) in line]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    made = make_workplace(tmp_path_factory.mktemp("runs of 100%h"), CONFIG)
    made.finish("plain")
    return made


def test_one_rank_of_two_is_recorded_and_the_bits_are_the_same(place: Workplace) -> None:
    assert place.finish("recorded", *asked("[4,6]")) == place.digest("plain")

    run = place.run("recorded")
    (report,) = run.nsys_reports()
    assert report.name.startswith("attempt-0.rank-0.")
    assert report.stat().st_size > 1000
    assert f"note: nsys has written its report of rank 0: {report}" in run.console.read_text()
    assert left(run) == []


def test_a_stop_while_nsys_records_commits_and_a_resume_ends_with_the_same_bits(place: Workplace) -> None:
    started = place.submit("stopped", *asked("[4,99]", "[0,1]"))
    run = place.run("stopped")
    assert started.returncode == 0, started.stderr
    wait_for(lambda: "committed" in run.console.read_text())

    place.command("stop", "stopped")
    wait_for(lambda: left(run) == [])

    assert place.finish("stopped", *asked("[4,99]", "[0,1]")) == place.digest("plain")
    assert {path.name.partition(".rank")[0] for path in run.nsys_reports()} == {"attempt-0", "attempt-1"}


def test_a_worker_that_is_killed_while_nsys_records_is_the_cause_and_the_next_attempt_ends_with_the_same_bits(
    place: Workplace,
) -> None:
    assert place.submit("killed", *asked("[4,99]")).returncode == 0
    run = place.run("killed")
    wait_for(lambda: "committed" in run.console.read_text())
    worker = worker_under_nsys(run)
    assert worker is not None

    worker.kill()
    wait_for(lambda: left(run) == [])

    assert place.finish("killed", *asked("[4,99]")) == place.digest("plain")
    assert "SIGKILL" in run.attempts.read_text()
