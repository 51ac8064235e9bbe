"""Durations, shares and sizes as people say them."""

from __future__ import annotations

import math
from datetime import datetime, timezone


def duration(seconds: float | None) -> str:
    """Return `40 ms`, `3.2 s`, `4 min 05 s`, `1 h 02 min` or `3 d 4 h`; a dash where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms" if seconds > 0 else "0 s"
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def share(value: float | None) -> str:
    """Return `82 %`, or `0.4 %` where it is small; a dash where it is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    if 0 < value < 0.0005:
        return "< 0.1 %"
    return f"{value * 100:.1f} %" if 0 < value < 0.0995 else f"{value * 100:.0f} %"


def hours(value: float) -> str:
    """Return `3.2 h`; of little, minutes or seconds."""
    if value >= 100:
        return f"{value:,.0f} h"
    return f"{value:.1f} h" if value >= 1 else duration(value * 3600)


def milliseconds(value: float) -> str:
    """Return `12 ms`, `0.04 ms` or, from a second on, a `duration`."""
    if value >= 1000:
        return duration(value / 1000)
    return f"{value:.0f} ms" if value >= 9.95 else f"{value:.2g} ms"


def moment(at: float, pattern: str = "%d %b %H:%M:%S") -> str:
    """Return a time, in seconds since the epoch, as this host's clock shows it."""
    return datetime.fromtimestamp(at, tz=timezone.utc).astimezone().strftime(pattern)


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
