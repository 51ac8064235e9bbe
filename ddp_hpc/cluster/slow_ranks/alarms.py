"""From one verdict to the next: when a rank has begun to be slow, and when that has ended. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace

from ddp_hpc.cluster.slow_ranks.judge import SlowRankVerdict
from ddp_hpc.run.run_dir.timeline import SlowRankAlarm

LOOKS_TO_BEGIN = LOOKS_TO_END = 2
"""How many looks in a row must find a rank slow, or as fast as the others. In between, nothing changes."""
MOST_OF_RANK, MOST = 3, 100
"""How many alarms of one rank, and of all ranks, an attempt may have."""


@dataclass
class Alarms:
    """The alarms of one attempt."""

    attempt: int
    open: dict[int, SlowRankAlarm] = field(default_factory=dict)
    """By rank."""
    _found: Counter[int] = field(default_factory=Counter)
    """In how many looks in a row each rank was slow."""
    _clear: Counter[int] = field(default_factory=Counter)
    """In how many looks in a row a rank with an alarm was as fast as the others."""
    _begun: Counter[int] = field(default_factory=Counter)
    """How many alarms each rank has had."""

    def update(self, verdict: SlowRankVerdict, *, now: float, step: int | None) -> list[SlowRankAlarm]:
        """Return the alarms that begin, end, or have got a cause. A look that says nothing changes nothing."""
        if verdict.unknown:
            return []
        slow = {one.rank: one for one in verdict.slow}
        self._found = Counter({rank: self._found[rank] + 1 for rank in slow})
        self._clear = Counter({rank: self._clear[rank] + 1 for rank in self.open if rank in verdict.clear})
        changed: list[SlowRankAlarm] = []
        for one in verdict.slow:
            may_begin = self._begun[one.rank] < MOST_OF_RANK and self._begun.total() < MOST
            if one.rank not in self.open and self._found[one.rank] >= LOOKS_TO_BEGIN and may_begin:
                self._begun[one.rank] += 1
                self.open[one.rank] = SlowRankAlarm(attempt=self.attempt, at=now, since_step=step, **asdict(one))
                changed.append(self.open[one.rank])
        for rank, alarm in [*self.open.items()]:
            if rank in slow and slow[rank].cause and not alarm.cause:
                self.open[rank] = replace(alarm, cause=slow[rank].cause)
                changed.append(self.open[rank])
            elif self._clear[rank] >= LOOKS_TO_END:
                changed.append(replace(self.open.pop(rank), ended_at=now, until_step=step))
        return changed

    def end_all(self, *, now: float, step: int | None) -> list[SlowRankAlarm]:
        """End all alarms, with the attempt."""
        return [replace(self.open.pop(rank), ended_at=now, until_step=step) for rank in [*self.open]]
