"""Signals held back as in a supervisor or an agent, within a process of tests, which may have threads."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from ddp_hpc.base import processes


def _do_nothing(*_: object) -> None:
    pass


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold them back until the block is left.

    SIGIO, which would end this process in any other thread, does nothing from here on: taking the handler away again, while
    one that came late still waits for it, is a race that Python reports.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    signal.signal(signal.SIGIO, _do_nothing)
    processes.block_awaited_signals()
    try:
        yield
    finally:
        while processes.await_signal(0.0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
