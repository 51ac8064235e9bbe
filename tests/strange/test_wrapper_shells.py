"""Trainings that a user's shell script starts in one of the usual ways: stopped once, killed with it, and started again."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.run.run_dir.failure_reports import first_failure
from ddp_hpc.run.run_dir.paths import RunDir
from tests.strange.test_scripts_of_users import work

TRAIN = """
import os, signal, sys, time
from pathlib import Path
begun, notes = Path("saved").exists(), open("notes", "a", buffering=1)
def save(*_):
    print("stopped", file=notes)
signal.signal(signal.SIGTERM, save)
print("resumed" if begun else f"began {os.getpid()}", file=notes)
if begun:
    sys.exit()
if sys.argv[1] == "killed":
    os.kill(os.getppid() if os.getppid() != int(os.environ["RANKS_PROCESS"]) else os.getpid(), signal.SIGKILL)
else:
    Path("runs/run/STOP").touch()
    signal.pause()
time.sleep(0.5)  # a second signal would come meanwhile
Path("saved").touch()
print("saved", file=notes)
sys.exit(99)
"""
ACTIVATE = """
activate() { eval "$(printf 'export CONDA_PREFIX=%s; hash -r' "$1")"; }
activate /opt/env || exit 1
"""
WRAPPERS = {
    "exec": 'set -euo pipefail\nexec python train.py "$@"',
    "a plain call": 'set -e\npython train.py "$@"\necho done',
    "functions": f'{ACTIVATE}run() {{ local -a words=(python train.py "$@"); "${{words[@]}}"; }}\nrun "$@"',
    "in the background, with a trap": "python train.py \"$@\" &\npid=$!\ntrap 'kill -TERM $pid' TERM\nwait $pid || wait $pid",
    "job control": 'set -m\npython train.py "$@" &\nwait',
    "a trap that waits for the foreground": "trap 'echo asked to stop' TERM\npython train.py \"$@\" | tee shown",
    "a trap of nothing": "trap '' TERM\npython train.py \"$@\"",
    "a trap at the exit": "trap 'rm -f scratch' EXIT\npython train.py \"$@\"\necho done",
}


def attempt(folder: Path, shell: str, *words: str) -> tuple[int, RunDir]:
    (folder / "train.py").write_text(TRAIN)
    script = folder / "train.sh"
    script.write_text(f"#!/bin/bash\nexport RANKS_PROCESS=$PPID\n{shell}\n")
    script.chmod(0o755)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return work(folder, "./train.sh", *words, settings=("script.stop_within_s=8",), PATH=path)


QUICK = {"exec", "in the background, with a trap", "a trap that waits for the foreground", "a trap at the exit"}


@pytest.mark.long
@pytest.mark.parametrize(
    "how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.long) for how in WRAPPERS]
)
def test_a_training_in_a_shell_script_is_stopped_once_and_comes_back_once(how: str, tmp_path: Path) -> None:
    code, run = attempt(tmp_path, WRAPPERS[how], "stopped")
    stopped = (tmp_path / "notes").read_text().splitlines()
    run.stop_request.unlink()
    again, _ = attempt(tmp_path, WRAPPERS[how], "stopped")

    assert (code, again) == (exit_codes.STOPPED, exit_codes.FINISHED), first_failure(run, 0)
    assert stopped[1:] == ["stopped", "saved"]
    assert (tmp_path / "notes").read_text().splitlines()[3:] == ["resumed"]


@pytest.mark.long
@pytest.mark.parametrize(
    "how", ["exec", "in the background, with a trap", "job control", "a trap that waits for the foreground"]
)
def test_a_training_whose_shell_is_killed_ends_with_it(how: str, tmp_path: Path) -> None:
    code, run = attempt(tmp_path, WRAPPERS[how], "killed")

    failure = first_failure(run, 0)
    assert code == exit_codes.FAILED
    assert failure is not None
    assert "SIGKILL" in failure.exception
    [began] = (tmp_path / "notes").read_text().splitlines()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in [int(began.split()[1])] if psutil.pid_exists(pid)], 10)
    assert not alive
