"""How often a run saves where it chooses that itself, and what that should cost beside what it has cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddp_hpc.run.checkpoints import save_interval
from ddp_hpc.run.checkpoints.failure_rate import between_failures_s
from ddp_hpc.run.checkpoints.past_saves import read_past
from ddp_hpc.run.checkpoints.save_interval import ASSUMED_STALL_S, SaveCosts, choose
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Mark
from ddp_hpc.watch.attempt_times import AttemptTime, read_times
from ddp_hpc.watch.goodput import measured_cost

if TYPE_CHECKING:
    from ddp_hpc.run.spec import CheckpointSpec


@dataclass(frozen=True, kw_only=True)
class SaveInterval:
    """The newest choice of `checkpoint.every_steps=auto`; the fields are the keys of `status --json` below `save_interval`."""

    every_steps: int
    seconds: float
    """About how long these steps take."""
    costs: SaveCosts
    is_measured: bool
    """Whether `stall_s` was measured; else it is assumed."""
    num_failures: int
    """Failures without warning that counted."""
    expected_cost: float
    """Which share of the time saves, repeated steps, and starts after failures should take."""
    measured_cost: float | None
    """Which share they have taken."""

    def sentence(self) -> str:
        """Return `every 340 steps (about 9 min): saves and failures take 1.2% of the time by estimate, and have taken 0.9%; ...`."""
        so_far = "" if self.measured_cost is None else f", and have taken {self.measured_cost:.1%}"
        numbers = save_interval.numbers(self.costs, num_failures=self.num_failures, is_measured=self.is_measured)
        often = save_interval.every(self.every_steps, self.seconds)
        return f"{often}: saves and failures take {self.expected_cost:.1%} of the time by estimate{so_far}; {numbers}"


def newest_interval(marks: Sequence[Mark], times: Sequence[AttemptTime]) -> SaveInterval | None:
    """Return the newest choice among a run's notes; None where there is none, or where its numbers are not whole."""
    found = [mark.interval for mark in marks if mark.kind == "interval"]
    if not found or not found[-1].keys() >= _NEEDED:
        return None
    newest = found[-1]
    return SaveInterval(
        every_steps=int(newest["every_steps"]),
        seconds=newest["seconds"],
        costs=SaveCosts(**{name: newest[name] for name in SaveCosts.__dataclass_fields__}),
        is_measured=bool(newest["is_measured"]),
        num_failures=int(newest["num_failures"]),
        expected_cost=newest["expected_cost"],
        measured_cost=measured_cost(times),
    )


_NEEDED = {*SaveInterval.__dataclass_fields__, *SaveCosts.__dataclass_fields__} - {"costs", "measured_cost"}


def outlook(run: RunDir, keys: CheckpointSpec, *, num_nodes: int, now: float) -> str:
    """Return how often the next attempt of a run would save at first, and why; what has cost how much where attempts have been.

    Raises:
        OSError: if the file system does not answer.
    """
    past = read_past(run, before=None, num_nodes=num_nodes)
    is_measured = bool(past.stalls_s)
    costs = SaveCosts(
        stall_s=past.stalls_s[-1] if is_measured else ASSUMED_STALL_S,
        write_s=median(past.writes_s) if past.writes_s else 0.0,
        restart_s=past.restart_s or 0.0,
        between_failures_s=between_failures_s(
            num_failures=past.num_failures, trained_s=past.trained_s, num_nodes=num_nodes
        ),
    )
    best_s, why = choose(costs, keys, is_measured=is_measured, first_within_s=past.first_within_s)
    reason = save_interval.reason(costs, why, num_failures=past.num_failures, is_measured=is_measured)
    cost = measured_cost(read_times(run, now=now, is_alive=False))
    so_far = "" if cost is None else f", and have taken {cost:.1%} so far"
    often, expected = save_interval.roughly(best_s), costs.share(best_s)
    return f"about every {often} at first: saves and failures take {expected:.1%} of the time by estimate{so_far}; {reason}"
