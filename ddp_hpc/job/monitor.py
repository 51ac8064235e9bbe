"""What a supervisor monitors while the workers run: signals, the time limit, and hangs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Literal

from ddp_hpc.base.patience import ask_once
from ddp_hpc.base.processes import STOP_SIGNALS
from ddp_hpc.run.requeue import requeue_reserve_s

END_QUERY_INTERVAL_S = 300.0
"""How long after one question when the job ends the next one comes."""
POLL_INTERVAL_S = 5.0
"""The longest time between two looks."""
LAG_BEHIND_WATCHDOG_S = 60.0
"""How much later than the workers' own watchdogs this timeout fires: only where theirs could not."""


@dataclass(kw_only=True)
class Monitor:
    """What may end an attempt from outside."""

    ends_at: float | None
    """When the time limit ends the job, in seconds since the epoch, as all times here."""
    lead_s: float
    hang_timeout_s: float
    signs_of_life: tuple[Path, ...]
    """Files that the workers write as long as they make progress."""
    first_sign: Path | None = None
    """The first file that they write: once it exists, they handle stop signals."""
    ask_end: Callable[[], float | None] = lambda: None
    """Ask when the job ends: its time limit may have changed. None: that is not known."""
    note_end: Callable[[float], None] = lambda _: None
    """Record another end than the known one."""
    ask_preempted: Callable[[], bool] = lambda: False
    """Ask whether Slurm is preempting the job."""
    is_out_of_time: bool = False
    is_signalled: bool = False
    is_unresponsive: bool = False
    is_cut_short: bool = False
    """Whether they were killed because they still ran when the job had to end."""
    suspended_until: float | None = None
    """When this process resumed, after Slurm had suspended the job for longer than the hang timeout."""
    silence_s: float = 0.0
    """For how long no worker has written anything, at the last look."""
    _newest_sign: float = 0.0
    _looked_at: float | None = None
    _has_asked: bool = False
    _asked_end_at: float | None = None

    def next_action(self, number: int | None, now: float) -> Literal["", "stop", "end"]:
        """Return what to do with the workers now; `number` is the signal that came, if one did."""
        had_time = not self.is_out_of_time
        self.is_out_of_time = self.is_out_of_time or self._has_run_out(now)
        if self.is_out_of_time and not self.is_cut_short and now >= self._kill_time():
            self.is_cut_short = True
            return "end"
        if number in STOP_SIGNALS:
            self.is_signalled = True
            return "stop"
        if self.is_out_of_time and had_time:
            return "stop"
        if self._silent_s(now) > self.hang_timeout_s + LAG_BEHIND_WATCHDOG_S and not self.is_unresponsive:
            self.is_unresponsive = True
            return "end"
        return "stop" if self._has_missed_signal() else ""

    def was_just_suspended(self, now: float) -> bool:
        """Tell whether the job was resumed so recently that the workers' watchdogs may have killed them for the suspension."""
        return self.suspended_until is not None and now - self.suspended_until < LAG_BEHIND_WATCHDOG_S

    def patience_s(self, now: float) -> float:
        """Return how long to wait at most before the next look."""
        moment = self._kill_time() if self.is_out_of_time else self._stop_time()
        return POLL_INTERVAL_S if self.is_cut_short else max(0.0, min(POLL_INTERVAL_S, moment - now))

    def is_stopping_within(self, seconds: float, now: float) -> bool:
        """Tell whether the workers are asked to stop within this time, or have been."""
        return self.is_signalled or self.is_out_of_time or now + seconds >= self._stop_time()

    def _has_run_out(self, now: float) -> bool:
        """Tell whether it is time to stop; ask now and then when the job ends, and in any case before it is time."""
        if self._asked_end_at is None:
            self._asked_end_at = now
        if now >= self._stop_time() or now - self._asked_end_at >= END_QUERY_INTERVAL_S:
            self._asked_end_at, known_end = now, self.ends_at
            self.ends_at = self.ask_end() or known_end
            if self.ends_at is not None and self.ends_at != known_end:
                self.note_end(self.ends_at)
        return now >= self._stop_time()

    def _stop_time(self) -> float:
        """Return when the workers are asked to stop."""
        return inf if self.ends_at is None else self.ends_at - self.lead_s

    def _kill_time(self) -> float:
        """Return when the workers are killed, so that the job can be requeued before its time limit."""
        return inf if self.ends_at is None else self.ends_at - requeue_reserve_s(self.lead_s)

    def _has_missed_signal(self) -> bool:
        """Ask once, when the workers handle signals, whether Slurm preempted the job before: it does not signal again."""
        if self._has_asked or self.is_signalled or self.first_sign is None:
            return False
        if not ask_once(self.first_sign, self.first_sign.exists, unknown=False):
            return False
        self._has_asked = True
        self.is_signalled = self.ask_preempted()
        return self.is_signalled

    def _silent_s(self, now: float) -> float:
        """Return how long no worker has written anything, without the time in which this process was suspended.

        A file may have a modification time in the future: until then the workers may be silent (`Watchdog.allow`).
        """
        if self._looked_at is not None and now - self._looked_at > self.hang_timeout_s:
            self.suspended_until = now
        newest = 0.0
        for path in self.signs_of_life:
            with suppress(OSError):
                newest = max(newest, path.stat().st_mtime)
        since = 0.0 if self._looked_at is None else min(max(now - self._looked_at, 0.0), 2 * POLL_INTERVAL_S)
        self.silence_s = 0.0 if newest != self._newest_sign or newest > now else self.silence_s + since
        self._newest_sign, self._looked_at = newest, now
        return self.silence_s
