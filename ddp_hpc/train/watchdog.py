"""Kills a process that hangs, after its stacks have been written to its log.

Every rank feeds its own watchdog while it makes progress. If one rank hangs, all others wait for it within one step, so the
timeouts of all ranks fire at about the same time, and their logs show which rank the others wait for.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from ddp_hpc.base.durable import open_private
from ddp_hpc.cluster.rank_probe.deadlines import Deadline

FEED_INTERVAL_S = 0.5
"""Feeding starts a thread, which takes about 50 us, so it is not done more often."""
LOG_TOUCH_INTERVAL_S = 5.0
TEARDOWN_S = 30.0
"""How long a finished worker may take to leave the process group."""


@dataclass
class Watchdog:
    """Kills this process if it is not fed for `timeout_s`; without a timeout it does nothing.

    With `touches_log` (rank zero) it also updates the modification time of its log, by which the supervisor sees that the
    run makes progress.
    """

    timeout_s: float | None
    _: KW_ONLY
    touches_log: bool = False
    allowance: Path | None = None
    """A file that says that this rank may take longer (`allow`)."""
    deadline: Deadline | None = None
    clock: Callable[[], float] = time.monotonic
    _is_allowed: bool = False
    _fed_at: float = float("-inf")
    _touched_at: float = float("-inf")

    def feed(self) -> None:
        """Report progress of this rank; nearly free if called often."""
        if self.timeout_s is None:
            return
        now = self.clock()
        if now - self._fed_at >= FEED_INTERVAL_S:
            self._fed_at = now
            # A C thread of faulthandler waits for the timeout, and needs neither the GIL nor the main thread: it also fires
            # while an extension hangs. With `exit=True` it calls _exit, without cleanup. Each call replaces the timer before:
            # https://docs.python.org/3/library/faulthandler.html#faulthandler.dump_traceback_later
            faulthandler.dump_traceback_later(self.timeout_s, exit=True, file=sys.stderr)
            self._put_off(self.timeout_s)
            if self._is_allowed and self.allowance is not None:
                self._is_allowed = False
                with suppress(OSError):
                    self.allowance.unlink(missing_ok=True)
        if self.touches_log and now - self._touched_at >= LOG_TOUCH_INTERVAL_S:
            self._touched_at = now
            with suppress(OSError):  # no file, or a full disk
                os.utime(sys.stderr.fileno())

    def allow(self, seconds: float) -> None:
        """Allow this rank, which builds the recipe, to take `seconds` until it is fed again, instead of the timeout."""
        if self.timeout_s is None:
            return
        self._fed_at = self._touched_at = float("-inf")
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
        self._put_off(seconds)
        if self.allowance is not None:
            # The supervisor learns of it by a file whose modification time lies in the future. The log cannot serve for that:
            # each line that is printed sets its time to now.
            until, self._is_allowed = time.time() + seconds, True
            with suppress(OSError):
                with open_private(self.allowance, "w") as file:
                    file.write("building")  # a `Phase`
                os.utime(self.allowance, (until, until))

    def dismiss(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._put_off(float("inf"))

    def _put_off(self, seconds: float) -> None:
        """Let this node know when to ask what this process does, before it ends."""
        if self.deadline is not None:
            self.deadline.put_off(seconds)


def leave_within(seconds: float, leave: Callable[[], object]) -> threading.Timer:
    """Call `leave` after `seconds` in a daemon thread, unless the process has exited by then."""
    # Python waits for other threads at exit, but not for daemon threads:
    # https://docs.python.org/3/library/threading.html#threading.Thread.daemon
    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    return timer
