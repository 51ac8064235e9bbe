"""What users read when something ends their run in a way that none of its processes could write down."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_hpc.cli import main
from ddp_hpc.cli.plan import make_launch_plan
from ddp_hpc.job.ending import attempt_end
from ddp_hpc.job.job_context import Outcome
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.job.workers import TaskWorkers
from ddp_hpc.launch.submission.request import SubmitRequest
from ddp_hpc.run.config.resolve import Resolved, load_resolved
from ddp_hpc.run.run_dir.ledger import Cause, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from tests.cli.test_submit import CONFIG, RECIPE, submit, until
from tests.made_run import make_run


def test_processes_that_were_all_killed_are_told_by_their_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "tiny.py").write_text(RECIPE)
    assert submit("run.yaml", "--cluster", "local", "recipe.args.pause_s=0.2", "train.epochs=1000").returncode == 0
    run = RunDir(tmp_path / "runs/run")
    supervisor = psutil.Process(Ledger.read(run).attempts[0].pid)
    agents = supervisor.children()
    request = SubmitRequest(resolved=Resolved(load_resolved(run.config), {}), import_paths=[tmp_path], environ={})
    planned = make_launch_plan(request, "local", [tmp_path])
    assert agents[0].cmdline() == shlex.split(planned.steps["the workers"]), "`--explain` shows what is started"

    for process in [*agents, *(below for agent in agents for below in agent.children(recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()

    until(lambda: Ledger.read(run).attempts[0].ending is not None)
    told = Ledger.read(run).attempts[0].reason
    assert told.startswith("signal 9 (SIGKILL) killed all workers before they could write an error report")
    assert "memory ran out" in told
    assert "`dmesg`" in told


@pytest.mark.parametrize(
    ("step_code", "told"),
    [
        (
            -signal.SIGKILL,
            "signal 9 (SIGKILL) killed all workers before they could write an error report: a user or Slurm sent it, or the kernel did",
        ),
        (128 + signal.SIGKILL, "`resources.mem_gb` asks for more memory"),
        (
            -signal.SIGSEGV,
            "signal 11 (SIGSEGV) killed all workers before they could write an error report: they crashed, or",
        ),
        (None, "the workers exited with code 1 and wrote no error report"),
        (1, "the workers exited with code 1 and wrote no error report"),
        (255, "the workers exited with code 1 and wrote no error report"),
    ],
)
def test_an_end_without_a_record_is_told_by_what_is_known_of_it(step_code: int | None, told: str) -> None:
    assert told in attempt_end._reason_of_end(Cause.WORKER_CRASHED, Outcome(code=1, step_code=step_code), None)


def test_a_step_that_was_killed_leaves_its_signal(tmp_path: Path) -> None:
    kill_self = [sys.executable, "-S", "-c", "import os; os.kill(os.getpid(), 9)"]
    workers = TaskWorkers(make_run(tmp_path), lambda *_: kill_self, lock_fds=[])
    workers.begin(0, Endpoint("10.0.0.1", 29500))

    deadline = time.monotonic() + 60
    while workers.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)

    assert workers.step_code == -signal.SIGKILL


@pytest.mark.parametrize("words", [["logs"], ["checkpoints", "--digest"]])
def test_a_command_that_a_message_names_works_for_a_run_in_another_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "my runs")

    assert main([*words, run.name, "--runs-dir=my runs"]) == 2
    named = re.search(r"`ddp-hpc ([^`]*)`", told := capsys.readouterr().err)

    assert named is not None, told
    assert main(shlex.split(named[1])) == 0
    assert run.name in capsys.readouterr().out
