"""Reports a rank's newest collectives at regular moments, from a thread beside the rank or in the process that watches it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.base.processes import host_name
from ddp_hpc.cluster.rank_probe.client import NoAnswerError, RankProbe
from ddp_hpc.cluster.rank_probe.folder import socket_of
from ddp_hpc.cluster.slow_ranks.clocks import ClockComparison
from ddp_hpc.cluster.slow_ranks.launches import read_launches
from ddp_hpc.cluster.slow_ranks.summary import ClockOffset, Phases, RankReport, write_report
from ddp_hpc.run.run_dir.paths import RunDir

LOOK_S = 5.0
"""The time between two reports, while the flight record is short and the ranks are few."""
ENTRIES_A_LOOK = 250
"""PyTorch takes about 30 us of a CPU for each entry of its record, so a record of 250 entries every 5 s takes 0.15 % of one."""
ENTRY_BYTES = 450
EARLY_S, LATER = 60.0, 4
"""How long after the beginning of a training the reports are as frequent as that. After that they are as many times rarer, and take
0.04 % of a CPU."""
RANKS_A_SECOND = 6.4
"""How many ranks may replace their report in the run directory in a second, all together, on average."""
WRITES_A_SECOND = 2 * RANKS_A_SECOND
"""All ranks read their records at the same moment, and write one after the other, in the first half of the time until the next moment."""
MOST_CLOCKS = 200
"""How many of the newest comparisons of clocks are kept."""


def pause_s(num_entries: int, world_size: int, *, is_early: bool) -> float:
    """Return the time between two reports: `LOOK_S`, doubled as often as a long record or a large world needs.

    All ranks have records of the same length, so all come to the same time.
    """
    shortest = pause = LOOK_S if is_early else LATER * LOOK_S
    while pause < max(shortest * num_entries / ENTRIES_A_LOOK, world_size / RANKS_A_SECOND):
        pause *= 2
    return pause


@dataclass(kw_only=True)
class Reporter:
    """Reports until it is closed."""

    run: RunDir
    attempt: int
    rank: int
    world_size: int
    node: str
    node_rank: int = 0
    probe: RankProbe
    phases: Callable[[], Phases | None] = lambda: None
    """The steps and the time in each phase since the beginning of the training."""
    compare_clocks: Callable[[], ClockOffset | None] = lambda: None
    """Compare this node's clock with that of rank zero's node; called before each report, by one rank of each node."""
    clock: Callable[[], float] = time.time
    _closing: threading.Event = field(default_factory=threading.Event)
    _pause_s: float = LOOK_S
    _began_at: float = field(default_factory=time.monotonic)
    _reported: Phases | None = None
    _clock: ClockOffset | None = None
    _clocks: list[tuple[float, ClockOffset]] = field(default_factory=list)
    """The newest comparisons, oldest first, each with its time."""

    def start(self) -> None:
        """Report from a thread of its own; a file system or a rank that does not answer delays nothing else."""
        if self.world_size > 1:
            threading.Thread(target=self._run, name="ddp-hpc-slow-ranks", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def report(self, turn: int) -> None:
        """Report once; a rank that does not answer, or not by a flight record, is a NoAnswerError."""
        try:
            text = self.probe.flight_record_text()
            kinds, launches = read_launches(text)
        except ValueError as error:
            raise NoAnswerError(str(error)) from error
        num_entries = len(text) // ENTRY_BYTES
        is_early = time.monotonic() - self._began_at < EARLY_S
        self._pause_s = pause_s(num_entries, self.world_size, is_early=is_early)
        summary = RankReport(
            rank=self.rank,
            world_size=self.world_size,
            node=self.node,
            node_rank=self.node_rank,
            turn=turn,
            kinds=kinds,
            launches=launches,
            clock=self._clock_since(min((one.at_us[0] / 1e6 for one in launches), default=self.clock())),
            phases=self._phases_since(),
        )
        if not self._closing.wait(self.rank / WRITES_A_SECOND):
            write_report(self.run, self.attempt, summary)

    def _run(self) -> None:
        while not self._closing.wait(self._pause_s - self._now() % self._pause_s):
            turn = round(self._now() / LOOK_S)  # of this moment, which is the same on all ranks
            self.compare()
            # Without an answer there is no report, and nothing is said of this rank. The next look tries again.
            with suppress(NoAnswerError, OSError):
                self.report(turn)

    def compare(self) -> None:
        """Compare the clocks once; without an answer nothing is known of them."""
        self._clock = self.compare_clocks()
        self._clocks = [] if self._clock is None else [*self._clocks, (self.clock(), self._clock)][-MOST_CLOCKS:]

    def _clock_since(self, began_at: float) -> ClockOffset | None:
        """Return the clock, with an error that holds for all times since `began_at`; None where it was compared only once.

        Where a clock is set, the launches before have its old time: comparisons before and after differ by as much.
        """
        if len(self._clocks) < 2:
            return None
        newest = self._clocks[-1][1]
        # One from before `began_at`, too.
        first = max((index for index, (at, _) in enumerate(self._clocks) if at <= began_at), default=0)
        kept = [clock for _, clock in self._clocks[min(first, len(self._clocks) - 2) :]]
        error_s = newest.error_s + max(abs(one.ahead_s - newest.ahead_s) for one in kept)
        return ClockOffset(ahead_s=newest.ahead_s, error_s=error_s)

    def _now(self) -> float:
        """Return the time by the clock of rank zero's node, as far as it is known."""
        return self.clock() - (self._clock.ahead_s if self._clock is not None else 0.0)

    def _phases_since(self) -> Phases | None:
        """Return the phases since the last report."""
        now, before = self.phases(), self._reported
        self._reported = now
        if now is None or before is None:
            return now
        seconds = {name: now.seconds[name] - before.seconds.get(name, 0.0) for name in now.seconds}
        return Phases(num_steps=now.num_steps - before.num_steps, seconds=seconds)


def reporter_of(  # noqa: PLR0913  which rank of which attempt, and what it can compare
    run: RunDir,
    attempt: int,
    environ: Mapping[str, str],
    folder: str | None,
    *,
    phases: Callable[[], Phases | None] = lambda: None,
    has_store: bool = True,
) -> Reporter:
    """Return what reports for the rank that a worker's environment names; nothing where its node has no `folder` for sockets.

    With `has_store`, nodes compare their clocks through the store at which the ranks meet.
    """
    rank, clocks = int(environ["RANK"]), ClockComparison(run=run, attempt=attempt, environ=environ)
    if has_store:
        clocks.start()
    return Reporter(
        run=run,
        attempt=attempt,
        rank=rank,
        world_size=int(environ["WORLD_SIZE"]) if folder else 1,
        node=host_name(),
        node_rank=int(environ.get("NODE_RANK", 0)),
        probe=RankProbe(path=socket_of(Path(folder or ""), rank)),
        phases=phases,
        compare_clocks=clocks.compare if has_store else lambda: None,
    )
