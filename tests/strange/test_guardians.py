"""Guardians of supervisors in the surroundings that sites and users make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.base.errors import WorkerError
from ddp_hpc.job import guardian
from ddp_hpc.launch.render import render
from ddp_hpc.launch.submission import local
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger, Next, record_end
from ddp_hpc.run.spec import RunSpec, SlurmSpec
from tests.made_run import add_attempt, make_run

IGNORING = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "ddp_hpc.job.guardian", sys.argv[1]])
"""

OLDER = """
import sys
from ddp_hpc.base import processes
from ddp_hpc.job import guardian
del processes.restore_stop_signals  # which a supervisor calls, and the version that started this guardian did not have
sys.exit(guardian.main([sys.argv[1]]))
"""
WITHOUT_FILE_SYSTEM = """
import os, sys, time
from ddp_hpc.base import processes
from ddp_hpc.job import guardian
processes.block_awaited_signals()
guardian._run_supervisor(["--no-such-option"])
left = os.fork()
if left == 0:
    time.sleep(600)
sys.path.clear()
sys.path_importer_cache.clear()
try:
    guardian._kill_leftovers()
    print(os.path.exists(f"/proc/{left}"))
finally:
    processes.kill([left])
"""


def test_a_guardian_whose_parent_ignores_deaths_of_children_sees_its_supervisor_end(tmp_path: Path) -> None:
    """As some daemons that start users' commands do."""
    run = make_run(tmp_path)
    run.config.write_text("name: [")

    done = subprocess.run([sys.executable, "-c", IGNORING, str(run.path)], check=False, timeout=120)

    assert done.returncode == exit_codes.REFUSED


@pytest.mark.parametrize(
    "setup", ["set -euo pipefail", "IFS=,", "set -m", "trap 'echo bye' EXIT", "sleep 600 & sleeper=$!", "set -o posix"]
)
def test_a_supervisor_that_dies_is_replaced_whatever_the_shell_was_told_before(tmp_path: Path, setup: str) -> None:
    run, python, died = make_run(tmp_path), tmp_path / "python", tmp_path / "died"
    python.write_text(f"#!/bin/sh\n[ -e {died} ] && exit 99\ntouch {died}\nkill -9 $$\n")
    python.chmod(0o755)
    ending = ("trap 'kill $sleeper' EXIT",) if "sleeper" in setup else ()
    spec = RunSpec(name="digits", runs_dir=str(tmp_path), slurm=SlurmSpec(setup=(setup, *ending)))
    made = render(spec, run, chdir=tmp_path, python=str(python))
    environ = {**os.environ, "SLURM_JOB_ID": "7"}

    done = subprocess.run(["bash", "-c", made], env=environ, capture_output=True, text=True, check=False, timeout=120)

    assert done.returncode == exit_codes.STOPPED, done.stderr
    assert "exited unexpectedly with code 137" in done.stderr


@pytest.mark.parametrize("next_", ["", "in place"], ids=["killed amid an attempt", "killed before the next attempt"])
def test_a_guardian_that_gives_up_says_so_in_the_ledger(tmp_path: Path, next_: Next) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="failed" if next_ else None)
    if next_:
        end = End(ending=Ending.FAILED, exit_code=1, reason="killed", cause=Cause.SUPERVISOR_DIED, next=next_)
        record_end(run, 0, end)

    guardian._record_last_end(run, 0, "the supervisor was killed by signal 9, 6 times in a row")

    found = local.wait(run, 0, os.environ)
    assert (found.ending, found.cause, found.next) == ("failed", "supervisor died", "")
    told = "the supervisor was killed by signal 9, 6 times in a row; ddp-hpc does not start it again, so submit the run again"
    assert found.reason == (f"killed; {told}" if next_ else told)


def test_a_guardian_that_gives_up_says_nothing_of_attempts_before_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending=None)

    guardian._record_last_end(run, 1, "the supervisor was killed by signal 9, 6 times in a row")

    assert Ledger.read(run).attempts[0].ending is None


def test_a_run_whose_processes_are_gone_is_not_said_to_have_been_killed_where_nobody_knows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending=None)
    run.console.parent.mkdir(exist_ok=True)
    run.console.write_text("error: run was not readable; submit the run again.\n")

    with pytest.raises(WorkerError) as told:
        local.wait(run, 0, os.environ)

    assert "were killed, or could not write that file" in str(told.value)
    assert f"{run.console} ends with: error: run was not readable" in str(told.value)


def test_what_was_cancelled_before_a_submission_does_not_end_its_guardian(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="cancelled")

    assert [guardian._is_cancelled(run, since) for since in (0, 1)] == [True, False]


def test_a_guardian_of_an_older_version_starts_the_supervisor_of_the_version_that_is_installed_now(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    run.config.write_text("name: [")

    done = subprocess.run([sys.executable, "-c", OLDER, str(run.path)], check=False, timeout=60)

    assert done.returncode == exit_codes.REFUSED


def test_a_guardian_kills_what_a_dead_supervisor_left_though_it_can_import_nothing_more() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FILE_SYSTEM], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.stdout == "False\n", done.stderr
