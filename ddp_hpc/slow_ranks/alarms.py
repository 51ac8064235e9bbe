"""From one verdict to the next: when a rank has begun to be slow, when that has ended, and the run's record of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ddp_hpc.base.durable import append_json_line, read_json_lines
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.slow_ranks.verdict import SlowRank, Verdict

LEAST_S = 5.0
"""For how long a rank must be seen to be slow in one look; a record of shorter steps covers less, and needs two looks."""
LOOKS_TO_END = 3
"""How many looks in a row must find a rank as fast as the others."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A time in which the others wait for a rank."""

    attempt: int
    rank: int
    node: str
    lost_s: float
    """How long the others wait for it in each step."""
    share: float
    num_waiting: int
    cause: str
    at: float
    since_step: int | None
    """The newest step known when it was found."""
    ended_at: float | None = None
    until_step: int | None = None

    def sentence(self) -> str:
        """Say which rank is slow, what that costs, and why."""
        who = "the other rank waits" if self.num_waiting == 1 else f"the other {self.num_waiting} ranks wait"
        lost = f"{self.lost_s * 1000:.0f} ms" if self.lost_s < 1 else f"{self.lost_s:.1f} s"
        cause = f"; cause: {self.cause}" if self.cause else ""
        return f"rank {self.rank} on {self.node} is slow: {who} {lost} ({self.share:.0%}) of each step for it{cause}"


@dataclass
class Alarms:
    """The alarms of one attempt."""

    attempt: int
    open: dict[int, Alarm] = field(default_factory=dict)
    """By rank."""
    _found: Counter[int] = field(default_factory=Counter)
    """In how many looks in a row each rank was slow."""
    _clear: Counter[int] = field(default_factory=Counter)
    """In how many looks in a row a rank with an alarm was not."""

    def look(self, verdict: Verdict, *, now: float, step: int | None) -> list[Alarm]:
        """Return the alarms that begin, end, or have got a cause. A look that says nothing changes nothing."""
        if not verdict.is_known:
            return []
        slow = {one.rank: one for one in verdict.slow}
        self._found = Counter({rank: self._found[rank] + 1 for rank in slow})
        self._clear = Counter({rank: self._clear[rank] + 1 for rank in self.open if rank not in slow})
        changed = [
            self._begin(one, now, step)
            for one in verdict.slow
            if one.rank not in self.open and (verdict.seconds >= LEAST_S or self._found[one.rank] > 1)
        ]
        for rank, alarm in [*self.open.items()]:
            if rank in slow and slow[rank].cause and not alarm.cause:
                self.open[rank] = replace(alarm, cause=slow[rank].cause)
                changed.append(self.open[rank])
            elif self._clear[rank] >= LOOKS_TO_END:
                changed.append(self._end(rank, now, step))
        return changed

    def end(self, *, now: float, step: int | None) -> list[Alarm]:
        """End all alarms, with the attempt."""
        return [self._end(rank, now, step) for rank in [*self.open]]

    def _begin(self, slow: SlowRank, now: float, step: int | None) -> Alarm:
        self.open[slow.rank] = Alarm(attempt=self.attempt, at=now, since_step=step, **asdict(slow))
        return self.open[slow.rank]

    def _end(self, rank: int, now: float, step: int | None) -> Alarm:
        return replace(self.open.pop(rank), ended_at=now, until_step=step)


def record(run: RunDir, alarms: Iterable[Alarm]) -> None:
    """Add to the run's history what has changed."""
    for alarm in alarms:
        append_json_line(run.slow_ranks, asdict(alarm))


def read_alarms(run: RunDir) -> list[Alarm]:
    """Return the run's history, oldest first, each alarm as it was last recorded."""
    newest: dict[tuple[Any, ...], Alarm] = {}
    for line in read_json_lines(run.slow_ranks):
        try:
            alarm = Alarm(**{key: line[key] for key in Alarm.__dataclass_fields__})
        except (KeyError, TypeError):
            continue
        newest[alarm.attempt, alarm.rank, alarm.at] = alarm
    return [*newest.values()]


def open_alarms(run: RunDir, attempt: int | None) -> Sequence[Alarm]:
    """Return the ranks of an attempt that are slow now."""
    return [one for one in read_alarms(run) if one.attempt == attempt and one.ended_at is None]
