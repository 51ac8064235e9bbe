"""Format numbers, durations and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

DASH = "-"


def duration(seconds: float | None) -> str:
    """Return `3 s`, `4:05` or `1:02:03`."""
    if seconds is None or not math.isfinite(seconds):
        return DASH
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None) -> str:
    """Return a measured number with four significant digits."""
    if value is None:
        return DASH
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.4g}"


def named_numbers(values: Mapping[str, float]) -> str:
    """Return `loss 0.1234  accuracy 0.9833`."""
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())


def size(num_bytes: int | None) -> str:
    """Return a number of bytes, such as `1.5 GiB`."""
    if num_bytes is None:
        return DASH
    value, units = float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def or_dash(value: object) -> str:
    """Return the value, or a dash where there is none."""
    return DASH if value is None or value == "" else str(value)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Return aligned columns below a header. A line break in a cell is written as `\n`."""
    lines = [header, *([cell.replace("\n", "\\n") for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def as_json(value: Any) -> str:
    """Return JSON that every parser reads: NaN and infinity become null."""
    return json.dumps(_replace_nonfinite_floats(value, lambda _: None), indent=1, allow_nan=False)


def spell_nonfinite_floats(value: Any) -> Any:
    """Return the value with `nan`, `inf` and `-inf` as text."""
    return _replace_nonfinite_floats(value, str)


def _replace_nonfinite_floats(value: Any, odd: Callable[[float], Any]) -> Any:
    """Return the value with `odd` of each float that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else odd(value)
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite_floats(item, odd) for key, item in value.items()}
    return [_replace_nonfinite_floats(item, odd) for item in value] if isinstance(value, (list, tuple)) else value
