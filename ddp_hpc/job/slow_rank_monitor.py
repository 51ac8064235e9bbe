"""Looks in a thread of the supervisor for ranks that the others wait for, by what the ranks report in the run directory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.run_dir.records import read_progress
from ddp_hpc.run_dir.slow_ranks import Alarm, record
from ddp_hpc.slow_ranks.alarms import Alarms
from ddp_hpc.slow_ranks.summary import read_summary
from ddp_hpc.slow_ranks.verdict import judge

POLL_S = 1.0
"""How often to look whether rank zero has reported again."""
OTHERS_S = 1.0
"""How long after rank zero the others may take to write their reports."""


@dataclass(kw_only=True)
class SlowRankMonitor:
    """Looks until it is closed; a file system that does not answer delays this thread alone."""

    run: RunDir
    attempt: int
    world_size: int
    clock: Callable[[], float] = time.time
    _turn: int | None = None
    _alarms: Alarms = field(init=False)
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._alarms = Alarms(self.attempt)

    def start(self) -> None:
        """Look from now on, where there is more than one rank."""
        if self.world_size > 1:
            self._thread = threading.Thread(target=self._run, name="slow-ranks", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look no more, and end the alarms."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(OTHERS_S)
            if not self._thread.is_alive():  # else the file system does not answer
                self._say(self._alarms.end(now=self.clock(), step=self._step()), is_over=True)

    def look(self) -> list[Alarm]:
        """Judge what all ranks have reported; return what has changed."""
        paths = (self.run.launches(self.attempt, rank) for rank in range(self.world_size))
        verdict = judge([one for path in paths if (one := read_summary(path)) is not None])
        return self._alarms.look(verdict, now=self.clock(), step=self._step())

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            with suppress(
                OSError
            ):  # the file system does not answer now: nothing is known, and the next look tries again
                first = read_summary(self.run.launches(self.attempt, 0))
                if first is None or first.turn == self._turn:
                    continue
                self._turn = first.turn
                if self._closing.wait(OTHERS_S):
                    return
                self._say(self.look())

    def _say(self, changed: list[Alarm], *, is_over: bool = False) -> None:
        for alarm in changed:
            if alarm.ended_at is None:
                sys.stderr.write(f"warning: {alarm.sentence()}\n")
            elif not is_over:
                sys.stderr.write(f"note: rank {alarm.rank} on {alarm.node} is as fast as the others again\n")
        with suppress(OSError):  # the line in the log stays
            record(self.run, changed)

    def _step(self) -> int | None:
        progress = read_progress(self.run)
        if progress is None or progress.attempt != self.attempt:
            return None
        return progress.step or (
            0 if progress.saves is None else None
        )  # a script's steps are known where it reports them
