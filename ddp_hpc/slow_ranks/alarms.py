"""From one verdict to the next: when a rank has begun to be slow, and when that has ended. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from ddp_hpc.run_dir.slow_ranks import Alarm
from ddp_hpc.slow_ranks.verdict import SlowRank, Verdict

LEAST_S = 5.0
"""For how long a rank must be seen to be slow in one look; a record of shorter steps covers less, and needs two looks."""
LOOKS_TO_END = 3
"""How many looks in a row must find a rank as fast as the others."""


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
