"""Certify that is ended leaves no training behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_hpc.base import processes

PATIENCE_S = 120.0


def processes_in(place: Path) -> list[str]:
    """Return the command lines of processes that work in a directory, or name it."""
    found = []
    for each in psutil.process_iter():
        try:
            words = " ".join(each.cmdline())
            is_there = str(place) in words or Path(each.cwd()).is_relative_to(place)
        except psutil.Error:
            continue
        if is_there and each.status() != psutil.STATUS_ZOMBIE:
            found.append(words)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_ends_the_work_and_a_second_one_does_not_end_the_cleaning_up(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    cleaned_up = []

    def work() -> None:
        with processes.signals_as_ctrl_c():
            try:
                os.kill(os.getpid(), number)
                time.sleep(PATIENCE_S)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), number)
                cleaned_up.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()

    assert cleaned_up
    assert signal.getsignal(number) == before


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    with processes.signals_as_ctrl_c():
        os.kill(os.getpid(), signal.SIGHUP)

    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN


@pytest.mark.long
@pytest.mark.parametrize("is_training", [False, True], ids=["before the run has begun", "while the script trains"])
def test_certify_that_gets_sigterm_ends_the_run_that_it_has_started(tmp_path: Path, is_training: bool) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('step 1', flush=True)\ntime.sleep(500)\n")
    argv = [sys.executable, "-m", "ddp_hpc", "certify", "resources.workers_per_node=1", "--", "python", "train.py"]
    certify = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + PATIENCE_S
    sign = "step 1" if is_training else "submit"

    def has_come() -> bool:
        if is_training:
            return any(sign in log.read_text() for log in tmp_path.rglob("rank-0.log"))
        return any(sign in words for words in processes_in(tmp_path))

    while not has_come() and time.monotonic() < deadline:
        time.sleep(0.1)
    found = processes_in(tmp_path)
    certify.terminate()
    output, _ = certify.communicate(timeout=PATIENCE_S)

    assert certify.returncode == 130, output
    assert len(found) > (3 if is_training else 1)
    assert processes_in(tmp_path) == []
