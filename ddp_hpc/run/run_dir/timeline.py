"""What rank zero notes of the time of a run, what each comparison of all ranks found, and for which ranks the others had to wait."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Literal

from ddp_hpc.base.durable import lines_of
from ddp_hpc.base.record import append_record, decode_record, read_records
from ddp_hpc.run.run_dir.paths import RunDir

MarkKind = Literal["begin", "phases", "save", "evaluation", "interval"]
MOST_COMPARISONS = 20_000
"""How many comparisons are read. A run of ten weeks has fewer; of more, evenly spaced ones show the same."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One line of `timeline.jsonl`."""

    kind: MarkKind
    attempt: int
    at: float
    """When it was written: at the end of a save or an evaluation."""
    step: int
    world_size: int | None = None
    """Of the attempt; in the line of its beginning, as the next."""
    num_gpus: int | None = None
    """How many GPUs the workers use, on all nodes."""
    seconds: float | None = None
    """How long the save took to be committed, or the evaluation took."""
    num_steps: int | None = None
    """How many steps of this attempt the phases are of."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds in each phase of rank zero since the attempt's training began."""
    interval: Mapping[str, float] = field(default_factory=dict)
    """What `checkpoint.every_steps=auto` has chosen, and by which numbers (`train.auto_interval`)."""


@dataclass(frozen=True, kw_only=True)
class RankComparison:
    """One line of `waits.jsonl`: one comparison of all ranks."""

    attempt: int
    at: float
    step: int | None = None
    step_s: float
    """The middle one of the times between two steps."""
    lost_s: Mapping[int, float]
    """Rank -> how much later than the middle one of the others it was in the middle one of its steps; below zero, it was earlier."""


def as_line(record: Mark | RankComparison) -> bytes:
    """Return a record as a line; fields that say nothing are left out."""
    return json.dumps({key: value for key, value in asdict(record).items() if value not in (None, {})}).encode() + b"\n"


def read_marks(run: RunDir) -> list[Mark]:
    """Return what rank zero has noted, oldest first; empty for a script, and for a run of an older version.

    A line that is half written, or not ours, is skipped.
    """
    return [*read_records(run.timeline, Mark)]


def read_comparisons(run: RunDir) -> list[RankComparison]:
    """Return the comparisons of all ranks, oldest first; empty where none was made. Of very many, some are left out.

    A line that is half written, or not ours, is skipped.
    """
    every = 1 + sum(1 for _ in lines_of(run.waits)) // MOST_COMPARISONS
    chosen = islice(lines_of(run.waits), 0, None, every)
    return [look for line in chosen if (look := decode_record(line, RankComparison)) is not None]


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank for which the others wait."""

    rank: int
    node: str
    lost_s: float
    """How long the others wait for it in each step."""
    share: float
    """That, as a share of the step."""
    num_waiting: int
    """How many of the ranks that were compared wait."""
    cause: str = ""
    """The phase in which it takes longer than the others; empty where that is not known."""


@dataclass(frozen=True, kw_only=True)
class SlowRankAlarm(SlowRank):
    """A time in which the others wait for a rank."""

    attempt: int
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


def record_alarms(run: RunDir, alarms: Iterable[SlowRankAlarm]) -> None:
    """Add to the run's history what has changed."""
    for alarm in alarms:
        append_record(run.slow_ranks, alarm)


def read_alarms(run: RunDir) -> list[SlowRankAlarm]:
    """Return the run's history, oldest first, each alarm as it was last recorded."""
    alarms = read_records(run.slow_ranks, SlowRankAlarm)
    return [*{(alarm.attempt, alarm.rank, alarm.at): alarm for alarm in alarms}.values()]
