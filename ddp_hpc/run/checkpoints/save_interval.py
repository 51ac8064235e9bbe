"""How often to save: the interval that costs the least time, what one costs, and how to say it. Pure."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # `status` needs no keys
    from ddp_hpc.run.spec import CheckpointSpec

ASSUMED_STALL_S = 1.0
"""How long training waits for a save, where none was measured yet."""
FIRST_SAVE_AFTER_S = 60.0
"""Where none was measured yet, the first save comes after so much training at the latest: it measures, and a wrong guess costs little."""
MIN_INTERVAL_IN_WRITES = 2.0
"""An interval is at least so many times as long as the newest saves took to be written: a save never waits for the one before
it, and the file system rests half of the time."""
LEAST_CHANGE_FACTOR = 1.3
"""An interval is changed where the best one is so many times longer or shorter. One that is so much off costs 4 % more than the
best: not of the time, but of what saves and repeated steps take of it."""

DecidedBy = Literal["least cost", "shortest", "longest", "written"]


def between_failures_s(*, num_failures: int, trained_s: float) -> float:
    """Return the expected time between two failures without warning, by Laplace's rule of succession: as if one more had come after half an hour more.

    A run that has just begun may have an error that ends it soon; the longer it trains, the longer it is expected to go on. Simulated beside a
    prior of published rates, this does as well (docs/results/save-intervals.md).
    """
    return (max(0.0, trained_s) + 1800.0) / (num_failures + 1)


def best_interval_s(stall_s: float, between_failures_s: float) -> float:
    """Return how long to train between two saves, by Daly's higher-order estimate of the optimum of Young.

    Young (1974), doi:10.1145/361147.361115; Daly (2006), doi:10.1016/j.future.2004.11.016, equation 37.
    """
    if stall_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = stall_s / (2 * between_failures_s)
    optimum = math.sqrt(2 * stall_s * between_failures_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9)
    return optimum - stall_s


@dataclass(frozen=True, kw_only=True)
class SaveCosts:
    """What saves and failures cost a run, in seconds."""

    stall_s: float
    """How long training waits for a save."""
    between_failures_s: float
    """The mean time between two failures without warning."""
    write_s: float = 0.0
    """From then until the save is committed; a failure before that loses it."""
    restart_s: float = 0.0
    """From a failure until the run trains again."""

    def cost_share(self, interval_s: float) -> float:
        """Return which share of the time saves, repeated steps and restarts are expected to take, if failures are independent.

        A run that has restarted commits after `restart + interval + stall + write`, and then after each `interval + stall`, until it fails.
        With exponential times between failures, the number of commits until then is a geometric series (Daly 2006, equation 20,
        where a save is written at once).
        """
        mean_s = self.between_failures_s
        period, delay = (interval_s + self.stall_s) / mean_s, (self.restart_s + self.write_s) / mean_s
        if period + delay > 700:  # the exponential would overflow: nothing is ever kept
            return 1.0
        return 1 - interval_s / mean_s / (math.exp(delay) * math.expm1(period))


def choose_interval(costs: SaveCosts, keys: CheckpointSpec, *, is_measured: bool = True) -> tuple[float, DecidedBy]:
    """Return how long to train between two saves, in seconds, and what decided that.

    Args:
        costs: what is known now; `write_s` also of a save that is still being written, as far as it has come.
        keys: the limits that users and sites have set.
        is_measured: whether `stall_s` was measured.
    """
    best_s = best_interval_s(costs.stall_s, costs.between_failures_s)
    found: tuple[float, DecidedBy] = (best_s if is_measured else min(best_s, FIRST_SAVE_AFTER_S), "least cost")
    found = min(found, (keys.max_interval_s, "longest"), key=itemgetter(0))
    return max(
        found, (keys.min_interval_s, "shortest"), (MIN_INTERVAL_IN_WRITES * costs.write_s, "written"), key=itemgetter(0)
    )


def is_worth_changing(now: float, best: float) -> bool:
    """Tell whether an interval is so far from the best one that it is changed."""
    return not now / LEAST_CHANGE_FACTOR < best < now * LEAST_CHANGE_FACTOR


_TIME_UNITS = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def duration_text(seconds: float) -> str:
    """Return `40 ms`, `1.2 s`, `9 min`, `11 h` or `154 d`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    unit, name = next((unit, name) for unit, name in _TIME_UNITS if seconds >= (1.5 * unit if unit > 1 else unit))
    count = seconds / unit
    return f"{count:.1f} {name}" if count < 9.95 and name != "min" else f"{count:.0f} {name}"


@dataclass(frozen=True, kw_only=True)
class SaveInterval:
    """How often a run saves, and the numbers that say what that costs; the fields are the keys of `status --json` below `save_interval`."""

    every_steps: int
    seconds: float
    """About how long these steps take."""
    costs: SaveCosts
    is_measured: bool = True
    """Whether `stall_s` was measured; else it is assumed."""
    num_failures: int
    """Failures without warning that counted."""
    expected_cost: float
    """Which share of the time saves, repeated steps, and starts after failures should take."""
    measured_cost: float | None = None
    """Which share they have taken."""

    def as_numbers(self) -> dict[str, float]:
        """Return all numbers in one mapping, as a run's timeline notes them."""
        values = {**asdict(self), **asdict(self.costs)}
        return {name: round(value, 6) for name, value in values.items() if isinstance(value, (int, float))}

    def interval_text(self) -> str:
        """Return `every 340 steps (about 9 min)`."""
        steps = "step" if self.every_steps == 1 else f"{self.every_steps} steps"
        return f"every {steps} (about {duration_text(self.seconds)})"

    def numbers_text(self) -> str:
        """Return the numbers that the interval follows from."""
        costs, often = self.costs, duration_text(self.costs.between_failures_s)
        failures = f"one failure every {often} is expected ({self.num_failures} so far)"
        if self.num_failures == 0:
            failures = f"no failure so far, one every {often} is assumed"
        start = f"a start takes {duration_text(costs.restart_s)}, " if costs.restart_s else ""
        stops = "stops" if self.is_measured else "is assumed to stop"
        return f"a save {stops} training for {duration_text(costs.stall_s)}, {start}{failures}"

    def reason_text(self, why: DecidedBy) -> str:
        """Return why the interval is as long as it is."""
        limit = {
            "shortest": "; not more often, because of `checkpoint.min_interval_s`",
            "longest": "; not less often, because of `checkpoint.max_interval_s`",
            "written": f"; not more often, because a save takes {duration_text(self.costs.write_s)} to be written",
        }
        return self.numbers_text() + limit.get(why, "")

    def sentence(self) -> str:
        """Return `every 340 steps (about 9 min): saves and failures take 1.2% of the time by estimate, and have taken 0.9%; ...`."""
        so_far = "" if self.measured_cost is None else f", and have taken {self.measured_cost:.1%}"
        return f"{self.interval_text()}: saves and failures take {self.expected_cost:.1%} of the time by estimate{so_far}; {self.numbers_text()}"
