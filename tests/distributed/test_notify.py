"""The user's command at events of a run: started once for each, with what happened in its environment, and never waited for long."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_hpc.run.run_dir.ledger import Ledger
from tests.distributed.whole_runs import Workplace, make_workplace

TEXT = """
recipe: {target: "trial_recipe:build", args: {num_samples: 24}}
train: {max_steps: 4, global_batch_size: 4}
notify: {command: [./tell.sh, "a word"]}
"""
TELL = """#!/bin/bash
printf '%s\\n' "$DDP_HPC_JSON" >> told.jsonl
[[ $DDP_HPC_EVENT == "$1" || $1 == 'a word' ]]
"""
PATIENCE_S = 90.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "this should have come about by now"
        time.sleep(0.02)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    made = make_workplace(tmp_path, TEXT)
    (tmp_path / "tell.sh").write_text(TELL)
    (tmp_path / "tell.sh").chmod(0o755)
    return made


def told(workplace: Workplace) -> list[dict[str, Any]]:
    path = workplace.path / "told.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(workplace: Workplace) -> list[tuple[str, str]]:
    return [(one["event"], one["state"]) for one in told(workplace)]


@pytest.mark.long
def test_a_run_tells_its_start_and_its_end_and_a_failure_with_the_reason(workplace: Workplace) -> None:
    done = workplace.submit("good", "--cluster", "local", "--wait")
    assert done.returncode == 0, done.stderr

    until(lambda: len(told(workplace)) >= 2)  # the end is recorded first
    assert events(workplace) == [("start", "running"), ("end", "finished")]
    start, end = told(workplace)
    assert (start["run"], start["attempt"], start["job_id"]) == ("good", "0", "")
    assert end["run_dir"] == str(workplace.run("good").path)
    assert end["step"] == "4"

    # It fails in its first batch. Of a run that is refused, nothing may be left by the time that a command would start.
    failed = workplace.submit("bad", "--cluster", "local", "--wait", "recipe.args.load_s=-1", "notify.on=[failure]")

    assert failed.returncode != 0
    until(lambda: len(told(workplace)) >= 3)
    (failure,) = told(workplace)[2:]
    assert (failure["event"], failure["run"], failure["next"]) == ("failure", "bad", "")
    assert failure["reason"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("[./missing.sh]", "'./missing.sh' cannot be started: No such file or directory"),
        ("[bash, -c, 'exit 7']", "'bash' exited with code 7"),
    ],
)
def test_a_command_that_fails_is_noted_in_the_log_and_changes_nothing(
    command: str, said: str, workplace: Workplace
) -> None:
    done = workplace.submit("run", "--cluster", "local", "--wait", f"notify.command={command}")

    assert done.returncode == 0, done.stderr
    until(lambda: said in workplace.run("run").console.read_text())


@pytest.mark.long
def test_workers_that_stand_still_are_told_once_before_they_are_killed(workplace: Workplace) -> None:
    settings = ("recipe.args.load_s=0.2", "restart.hang_timeout_s=8", "train.max_steps=40", "notify.on=[no_progress]")
    assert workplace.submit("still", "--cluster", "local", *settings).returncode == 0
    supervisor = psutil.Process(Ledger.read(workplace.run("still")).attempts[-1].pid)
    workers = [worker for agent in supervisor.children() for worker in agent.children()]
    for worker in workers:
        worker.suspend()

    until(lambda: told(workplace))

    for worker in workers:
        worker.resume()
    assert "no worker has made progress" in told(workplace)[0]["reason"]
    workplace.command("cancel", "still")
    assert len(told(workplace)) == 1


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_command_that_does_not_end_is_killed_with_what_it_has_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = (
        "import sys; from ddp_hpc.job import notifier; notifier.TIMEOUT_S = 0.5; sys.exit(notifier.main(sys.argv[1:]))"
    )
    command = ["bash", "-c", f"sleep 1000 & echo $! > {tmp_path}/child; wait"]

    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "did not end within 0.5 s, so it was killed; the run is not affected" in done.stderr
    child = int((tmp_path / "child").read_text())
    until(lambda: _has_ended(child))
