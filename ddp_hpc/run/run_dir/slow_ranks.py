"""A run's history of ranks that the others had to wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddp_hpc.base.record import append_record, read_records
from ddp_hpc.run.run_dir.paths import RunDir


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


def record(run: RunDir, alarms: Iterable[Alarm]) -> None:
    """Add to the run's history what has changed."""
    for alarm in alarms:
        append_record(run.slow_ranks, alarm)


def read_alarms(run: RunDir) -> list[Alarm]:
    """Return the run's history, oldest first, each alarm as it was last recorded."""
    newest: dict[tuple[Any, ...], Alarm] = {}
    for alarm in read_records(run.slow_ranks, Alarm):
        newest[alarm.attempt, alarm.rank, alarm.at] = alarm
    return [*newest.values()]
