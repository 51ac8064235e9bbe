"""Axes: round numbers between two values, and where they stand. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ddp_hpc.watch.report.words import moment

_STEPS = (1, 2, 2.5, 5, 10)
_TIMES = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True)
class Tick:
    """A mark of an axis."""

    at: float
    """Where: 0 at the axis' begin, 1 at its end."""
    text: str


@dataclass(frozen=True)
class ChartAxis:
    """An axis from one value to another, with its marks."""

    low: float
    high: float
    ticks: Sequence[Tick]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value stands: 0 at the begin, 1 at the end; values beyond stand at the ends."""
        low, high, value = (self._scaled(one) for one in (self.low, self.high, value))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.is_log else value


def linear(low: float, high: float, *, count: int = 5, text: Callable[[float], str] | None = None) -> ChartAxis:
    """Return an axis from `low` to `high`, with about `count` round numbers."""
    if not high > low:
        low, high = low - abs(low or 1) * 0.05, low + abs(low or 1) * 0.05
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((one * power for one in _STEPS if one * power >= rough * 0.999), 10 * power)
    numbers = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    axis = ChartAxis(low, high, ())
    return ChartAxis(
        low, high, [Tick(axis.place(one), (text or compact)(0.0 if abs(one) < step / 1e6 else one)) for one in numbers]
    )


def logarithmic(low: float, high: float) -> ChartAxis:
    """Return an axis in powers of ten, for values above zero."""
    axis = ChartAxis(low, high, (), is_log=True)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if high / low < 100 else (1, 3) if high / low < 1000 else (1,)
    every = max(1, len(decades) // 6)
    marks = [factor * 10.0**decade for decade in decades if decade % every == 0 for factor in factors]
    return ChartAxis(
        low, high, [Tick(axis.place(one), compact(one)) for one in marks if low <= one <= high], is_log=True
    )


def clock_times(begin: float, end: float, *, count: int = 5) -> ChartAxis:
    """Return an axis of local times, in seconds since the epoch, with marks at round times."""
    end = max(end, begin + 1)
    step = next((one for one in _TIMES if one * count >= end - begin), 0) or 86400 * math.ceil(
        (end - begin) / 86400 / count
    )
    offset = datetime.fromtimestamp(begin, tz=timezone.utc).astimezone().utcoffset()
    shift = offset.total_seconds() if offset else 0.0
    first = math.ceil((begin + shift) / step) * step - shift
    axis = ChartAxis(begin, end, ())
    pattern = (
        "%H:%M:%S" if step < 60 else "%H:%M" if end - begin < 86400 else "%d %b %H:%M" if step < 86400 else "%d %b"
    )
    marks = [first + number * step for number in range(int((end - first) // step) + 1)] if first <= end else []
    return ChartAxis(begin, end, [Tick(axis.place(one), moment(one, pattern)) for one in marks])


def compact(value: float) -> str:
    """Return a number in few characters: `0.05`, `1200`, `25k`, `1.5M`, `3e-07`; `NaN` or `infinite`."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}infinite"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.2g}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"
