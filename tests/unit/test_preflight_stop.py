"""A stop that is asked for while the nodes are checked ends the check."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from ddp_hpc.base import processes
from ddp_hpc.job.wire.subprocesses import run_for_out_and_err


@pytest.fixture
def blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    yield
    while signal.SIGTERM in signal.sigpending():
        signal.sigwait([signal.SIGTERM])
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("blocked")
def test_a_pending_stop_ends_a_command_long_before_its_time() -> None:
    began = time.monotonic()
    signal.raise_signal(signal.SIGTERM)

    printed, _ = run_for_out_and_err(
        ["sh", "-c", "echo begun; exec sleep 60"], environ={}, timeout_s=60, is_over=processes.is_stop_pending
    )

    assert printed == "begun\n"
    assert time.monotonic() - began < 30


def test_a_command_that_ends_is_read_whole() -> None:
    assert run_for_out_and_err(["sh", "-c", "echo out; echo err >&2"], environ={}, timeout_s=60) == ("out\n", "err\n")


def test_a_command_that_takes_too_long_says_so() -> None:
    printed, errors = run_for_out_and_err(["sh", "-c", "echo out; exec sleep 60"], environ={}, timeout_s=0.2)

    assert printed == "out\n"
    assert "sh did not end within 0 s" in errors
