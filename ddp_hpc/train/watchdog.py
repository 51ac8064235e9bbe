"""What ends a process that stands still: its stacks in its log first, then the process.

Every rank feeds its own watchdog as it goes. When one rank stands still, all do within a step, so all watchdogs bark at
about the same time, and the logs show who waits for whom. The dog is a thread in C that needs nothing of Python, not
even its lock: it also bites a process stuck in somebody's extension (https://docs.python.org/3/library/faulthandler.html).
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddp_hpc.durable import open_private
from ddp_hpc.failure_reports import Phase

FEED_INTERVAL_S = 0.5
"""Feeding costs a thread, some 50 us, so it is done no more often."""
SIGN_INTERVAL_S = 5.0
TEARDOWN_S = 30.0
"""How long a process whose work is done may take to leave its group."""


class Watchdog:
    """Ends this process when it is not fed for a while; without a timeout, it sleeps.

    Rank zero's also renews its log's time of change, which the supervisor takes for a sign of life.
    """

    def __init__(
        self,
        timeout_s: float | None,
        *,
        gives_sign: bool = False,
        allowance: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._gives_sign = gives_sign
        self._allowance = allowance
        self._is_allowed = False
        self._clock = clock
        self._fed_at = self._signed_at = float("-inf")

    def feed(self) -> None:
        """Say that this rank moves; nearly free when it was said a moment ago."""
        if self._timeout_s is None:
            return
        now = self._clock()
        if now - self._fed_at >= FEED_INTERVAL_S:
            self._fed_at = now
            faulthandler.dump_traceback_later(self._timeout_s, exit=True, file=sys.stderr)
            self._withdraw_allowance()
        if self._gives_sign and now - self._signed_at >= SIGN_INTERVAL_S:
            self._signed_at = now
            with suppress(OSError):  # no file, or a full disk
                os.utime(sys.stderr.fileno())

    def allow(self, seconds: float, phase: Phase = "building") -> None:
        """Let this rank stand still for so long, once: until it is fed again. `phase` is what takes so long.

        The supervisor sees it by a file that is dated ahead; a log would get another date by each line that is printed.
        """
        if self._timeout_s is None:
            return
        self._fed_at = self._signed_at = float("-inf")
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
        if self._allowance is not None:
            until, self._is_allowed = time.time() + seconds, True
            with suppress(OSError):
                with open_private(self._allowance, "w") as file:
                    file.write(phase)
                os.utime(self._allowance, (until, until))

    def _withdraw_allowance(self) -> None:
        if self._allowance is not None and self._is_allowed:
            self._is_allowed = False
            with suppress(OSError):
                self._allowance.unlink(missing_ok=True)

    def dismiss(self) -> None:
        """Watch no more."""
        faulthandler.cancel_dump_traceback_later()


def leave_within(seconds: float, leave: Callable[[], object]) -> threading.Timer:
    """Have `leave` called after so long, whatever the rest of this process does, unless it is gone by then."""
    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    return timer
