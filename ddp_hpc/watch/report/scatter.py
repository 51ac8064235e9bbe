"""The chart of a metric against a key of a sweep: a dot for each point, and a line through the best of each value. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ddp_hpc.watch.report.axes import ChartAxis, Tick, compact, linear, logarithmic
from ddp_hpc.watch.report.charts import BOX, Chart, Curve, Dot, path, value_axis
from ddp_hpc.watch.report.series import ChartPoint

_MOST_VALUES = 12
"""A key with at most so many values has them side by side, at equal distances."""
_MOST_LABELS = 6
_LONGEST_LABEL = 14
_LOG_FROM = 20


def key_chart(
    key: str, metric: str, measured: Sequence[tuple[Any, float, str]], *, is_highest: bool = False
) -> Chart | None:
    """Return the chart of one key; None where all points have the same value of it.

    `measured`: of each point its value of the key, the metric, and its name.
    """
    values = list(dict.fromkeys(_text(value) for value, _, _ in measured))
    if len(values) < 2:
        return None
    numbers = {_text(value): float(value) for value, _, _ in measured if _is_number(value)}
    are_numbers = len(numbers) == len(values)
    if are_numbers:
        values.sort(key=numbers.__getitem__)
    if are_numbers and len(values) > _MOST_VALUES:
        x, at = _number_axis([*numbers.values()]), numbers
    else:
        x, at = _value_places(values), {text: number + 0.5 for number, text in enumerate(values)}
    y = value_axis([value for _, value, _ in measured])
    dots = dict.fromkeys(
        f"M{x.place(at[_text(value)]) * BOX:.0f} {(1 - y.place(measure)) * BOX:.0f}h0" for value, measure, _ in measured
    )
    pick = max if is_highest else min
    best: dict[str, float] = {}
    for value, measure, _ in measured:
        best[_text(value)] = pick(best.get(_text(value), measure), measure)
    line = [ChartPoint(at[text], best[text]) for text in values]
    curves = [Curve("points", "".join(dots), "a dot for each point of the sweep")]
    if len(values) <= _MOST_VALUES and len(values) < len(measured):
        curves.append(Curve("main", path(line, x, y), f"the best {metric} of each value"))
    value, measure, name = pick(measured, key=lambda one: one[1])
    first = Dot(
        "best",
        x.place(at[_text(value)]) * BOX,
        (1 - y.place(measure)) * BOX,
        f"the best, {name}: {key} {_text(value)}, {metric} {compact(measure)}",
    )
    scales = [f"{name} axis logarithmic" for name, axis in (("x", x), ("y", y)) if axis.is_log]
    return Chart(title=key, unit=", ".join(scales), x=x, y=y, curves=curves, dots=[first])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value - value == 0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _value_places(values: Sequence[str]) -> ChartAxis:
    """Return an axis with a place for each value, and labels of a few of them."""
    every = -(-len(values) // _MOST_LABELS)
    short = [text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..." for text in values]
    ticks = [Tick((number + 0.5) / len(values), text) for number, text in enumerate(short) if number % every == 0]
    return ChartAxis(0.0, float(len(values)), ticks)


def _number_axis(values: Sequence[float]) -> ChartAxis:
    low, high = min(values), max(values)
    return logarithmic(low, high) if low > 0 and high / low > _LOG_FROM else linear(low, high, count=4)
