"""Axes: round numbers between two values, and where they stand. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ddp_hpc.watch.report.words import compact, moment

_ROUND_STEPS = (1, 2, 2.5, 5, 10)
_ROUND_TIMES_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_LOG_FROM = 20
"""Values that differ by more than this factor have a logarithmic axis."""


@dataclass(frozen=True)
class ChartAxis:
    """An axis from one value to another, with its marks."""

    low: float
    high: float
    marks: Mapping[float, str] = field(default_factory=dict)
    """Value -> its text."""
    is_log: bool = False

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Where the marks stand, and their texts."""
        return [(self.place(value), text) for value, text in self.marks.items()]

    def place(self, value: float) -> float:
        """Return where a value stands: 0 at the begin, 1 at the end; values beyond stand at the ends."""
        low, high, value = (
            math.log10(max(one, 1e-300)) if self.is_log else one for one in (self.low, self.high, value)
        )
        return min(1.0, max(0.0, (value - low) / (high - low)))


def axis(values: Iterable[float], *, margin: float = 0.06, count: int = 4, may_be_log: bool = False) -> ChartAxis:
    """Return an axis that holds all these values, with about `count` round numbers.

    `margin`: the free space beside the values, as a share of their range. `may_be_log`: logarithmic where they are above zero, and far
    from each other.
    """
    finite = [value for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    if may_be_log and low > 0 and high / low > _LOG_FROM:
        low, high = low / (1 + 2.5 * margin), high * (1 + 2.5 * margin)
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 2, 5) if high / low < 100 else (1, 3) if high / low < 1000 else (1,)
        every = max(1, len(decades) // 6)
        powers = [factor * 10.0**decade for decade in decades if decade % every == 0 for factor in factors]
        marks = [one for one in powers if low <= one <= high]
    else:
        beside = (high - low) * margin if high > low else abs(low or 1) * 0.05
        low, high = max(0.0, low - beside) if low >= 0 else low - beside, high + beside
        rough = (high - low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(one * power for one in _ROUND_STEPS if one * power >= rough * 0.999)
        marks = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        may_be_log = False
    return ChartAxis(low, high, {one: compact(one) for one in marks}, may_be_log)


def clock_axis(begin: float, end: float) -> ChartAxis:
    """Return an axis of local times, in seconds since the epoch, with at most six marks at round times."""
    length = max(end - begin, 1.0)
    step = next((one for one in _ROUND_TIMES_S if one * 5 >= length), 0) or 86400 * math.ceil(length / 86400 / 5)
    pattern = "%H:%M:%S" if step < 60 else "%H:%M" if length < 86400 else "%d %b %H:%M" if step < 86400 else "%d %b"
    first = math.ceil(begin / step) * step
    marks = range(first, math.floor(begin + length) + 1, step)
    return ChartAxis(begin, begin + length, {one: moment(one, pattern) for one in marks})
