"""Looks in a thread of the supervisor for ranks that the others wait for, by what the ranks report in the run directory."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from ddp_hpc.base.durable import open_private
from ddp_hpc.cluster.slow_ranks.alarms import Alarms
from ddp_hpc.cluster.slow_ranks.judge import SlowRankVerdict, judge
from ddp_hpc.cluster.slow_ranks.summary import RankReport, read_report, remove_reports
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.run_dir.timeline import RankComparison, SlowRankAlarm, as_line, record_alarms

POLL_S = 1.0
"""How often to look whether rank zero has reported again."""
CLOSE_WAIT_S = 2.0
"""How long the end of an attempt waits for the last line and the removal of the reports."""
NOTE_INTERVAL_SHARE = 0.005
"""The time between two noted comparisons grows with the attempt, to this share of its age: the lines of a week are about 1,500."""


@dataclass(kw_only=True)
class SlowRankMonitor:
    """Looks until it is closed; a file system that does not answer delays this thread alone."""

    run: RunDir
    attempt: int
    world_size: int
    clock: Callable[[], float] = time.time
    _turn: int | None = None
    """The look that rank zero has reported last."""
    _reports: list[RankReport] = field(default_factory=list)
    """Of that look, by rank, as far as they have come; all ranks write theirs in this order."""
    _is_judged: bool = False
    _alarms: Alarms = field(init=False)
    _began_at: float = field(init=False)
    _noted_at: float | None = None
    """When a comparison was noted last."""
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._alarms = Alarms(self.attempt)
        self._began_at = self.clock()

    def start(self) -> None:
        """Look from now on, where there is more than one rank."""
        if self.world_size > 1:
            self._thread = threading.Thread(target=self._run, name="slow-ranks", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look no more, end the alarms, and remove the reports."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(CLOSE_WAIT_S)  # longer where the file system does not answer

    def judge_reports(self) -> list[SlowRankAlarm]:
        """Judge what all ranks have reported of one look, once they have; return what has changed.

        Raises:
            OSError: if the file system does not answer now: nothing is known, and the next call tries again.
        """
        first = read_report(self.run.launches(self.attempt, 0))
        if first is None or (self._is_judged and first.turn == self._turn):
            return []
        if first.turn != self._turn:
            self._turn, self._reports, self._is_judged = first.turn, [first], False
        while len(self._reports) < self.world_size:
            one = read_report(self.run.launches(self.attempt, len(self._reports)))
            if one is None or one.turn != self._turn:
                return []  # the ranks after it write later, and all of them are needed
            self._reports.append(one)
        reports, self._is_judged, self._reports = self._reports, True, []
        verdict, now, step = judge(reports), self.clock(), self._newest_step()
        self._record_comparison(verdict, now=now, step=step)
        return self._alarms.update(verdict, now=now, step=step)

    def _record_comparison(self, verdict: SlowRankVerdict, *, now: float, step: int | None) -> None:
        """Add a comparison to the run directory, if the ranks could be compared and there is none that is nearly as new."""
        if not verdict.lost_s or (
            self._noted_at and now - self._noted_at < NOTE_INTERVAL_SHARE * (now - self._began_at)
        ):
            return
        self._noted_at = now
        look = RankComparison(
            attempt=self.attempt,
            at=now,
            step=step,
            step_s=round(verdict.step_s, 6),
            lost_s={rank: round(lost_s, 5) for rank, lost_s in verdict.lost_s.items()},
        )
        with suppress(OSError), open_private(self.run.waits, "ab") as file:  # the next comparison tries again
            file.write(b"\n" + as_line(look))

    def _run(self) -> None:
        while not self._closing.wait(POLL_S):
            with suppress(OSError):
                self._log_alarms(self.judge_reports())
        with suppress(OSError):
            self._log_alarms(self._alarms.end_all(now=self.clock(), step=self._newest_step()), is_over=True)
        with suppress(OSError):
            remove_reports(self.run, self.attempt)

    def _log_alarms(self, changed: list[SlowRankAlarm], *, is_over: bool = False) -> None:
        for alarm in changed:
            if alarm.ended_at is None:
                sys.stderr.write(f"warning: {alarm.sentence()}\n")
            elif not is_over:
                sys.stderr.write(f"note: rank {alarm.rank} on {alarm.node} is as fast as the others again\n")
        with suppress(OSError):  # the line in the log stays
            record_alarms(self.run, changed)

    def _newest_step(self) -> int | None:
        progress = read_progress(self.run)
        if progress is None or progress.attempt != self.attempt:
            return None
        # A script's steps are known where it reports them.
        return progress.step or (0 if progress.saves is None else None)
