"""Scripts that fork helpers: pools and daemons that are ended by SIGTERM, loader processes, and children that fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.failure_reports import first_failure
from tests.distributed.test_scripts import ENVIRON, Place

BEGIN = """
import multiprocessing, os, signal, sys, time
from ddp_hpc import attach
fork = multiprocessing.get_context("fork")
run = attach(stop_signals=['USR1'])
"""
POOLS_AND_A_DAEMON = """
for _ in range(20):
    with fork.Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
fork.Process(target=time.sleep, args=(600,), daemon=True).start()
print("ends")
"""
SIGNALS_TO_A_HELPER = """
def helper(told):
    for number in (signal.SIGUSR2, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    told.send("lives")
    time.sleep(600)

hears, told = fork.Pipe(duplex=False)
child = fork.Process(target=helper, args=(told,))
child.start()
assert hears.recv() == "lives"
os.kill(child.pid, signal.SIGTERM)
child.join()
assert child.exitcode == -signal.SIGTERM, child.exitcode
assert not run.should_stop(1)
print("ends")
"""
SIGTERM_BEFORE_PYTORCHS_HANDLER = """
import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
theirs = signal_handling._set_worker_signal_handlers

def late():
    os.kill(os.getpid(), signal.SIGTERM)
    theirs()

signal_handling._set_worker_signal_handlers = late
batches = DataLoader(torch.arange(4), num_workers=2, multiprocessing_context="fork")
assert [int(batch) for batch in batches] == [0, 1, 2, 3]
print("ends")
"""
HELPER_FAILS = """
import os
pid = os.fork()
if pid == 0:
    raise ValueError("only the helper")
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
print("ends")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "rest",
    [
        POOLS_AND_A_DAEMON,
        pytest.param(SIGNALS_TO_A_HELPER, marks=pytest.mark.long),
        pytest.param(SIGTERM_BEFORE_PYTORCHS_HANDLER, marks=pytest.mark.long),
    ],
    ids=["pools and a daemon", "signals to a helper", "a loader process that has just begun"],
)
def test_an_attached_script_ends_its_forked_helpers_by_sigterm_and_keeps_its_loaders(rest: str, tmp_path: Path) -> None:
    (tmp_path / "forks.py").write_text(BEGIN + rest)
    with subprocess.Popen(
        [sys.executable, "forks.py"],
        cwd=tmp_path,
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as script:
        try:
            printed, _ = script.communicate(timeout=60)
        finally:
            end_session(script.pid)

    assert (script.returncode, printed.splitlines()[-1:]) == (0, ["ends"]), printed


def end_session(leader: int) -> None:
    """Kill a script that hangs, with its helpers."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@pytest.mark.long
def test_a_forked_helper_that_fails_is_not_its_ranks_failure(tmp_path: Path) -> None:
    (tmp_path / "helped.py").write_text(HELPER_FAILS)
    place = Place(tmp_path)

    done = place.submit((), "python", "helped.py")

    assert done.returncode == 0, done.stdout + done.stderr
    assert first_failure(place.run("helped"), 0) is None
    log = place.log("helped")
    assert "ValueError: only the helper" in log
    assert log.splitlines()[-1] == "ends"
