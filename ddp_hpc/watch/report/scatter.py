"""The chart of a metric against a key of a sweep: a dot for each point, and a line through the best of each value. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from ddp_hpc.watch.report.axes import ChartAxis, Tick, axis
from ddp_hpc.watch.report.charts import GAP, Chart, Line, chart_of
from ddp_hpc.watch.report.series import ChartPoint
from ddp_hpc.watch.report.words import compact

_MOST_VALUES = 12
"""A key with at most so many values has them side by side, at equal distances."""
_MOST_LABELS = 6
_LONGEST_LABEL = 14


def key_chart(
    key: str, metric: str, measured: Sequence[tuple[Any, float, str]], *, is_highest: bool = False
) -> Chart | None:
    """Return the chart of one key; None where all points have the same value of it.

    `measured`: of each point its value of the key, the metric, and its name.
    """
    values = {_text(value): value for value, _, _ in measured}
    if len(values) < 2:
        return None
    are_numbers = all(type(one) in {int, float} and math.isfinite(one) for one in values.values())
    texts = sorted(values, key=values.__getitem__) if are_numbers else [*values]
    if are_numbers and len(texts) > _MOST_VALUES:
        x, at = axis(values.values(), margin=0.0, may_be_log=True), values
    else:
        x, at = _value_places(texts), {text: number + 0.5 for number, text in enumerate(texts)}
    y = axis((value for _, value, _ in measured), may_be_log=True)
    pick = max if is_highest else min
    best: dict[str, float] = {}
    for value, measure, _ in measured:
        best[_text(value)] = pick(best.get(_text(value), measure), measure)
    dots = dict.fromkeys(ChartPoint(at[_text(value)], measure) for value, measure, _ in measured)
    lines = [Line("points", [one for dot in dots for one in (dot, GAP)], "a dot for each point of the sweep")]
    if len(texts) <= _MOST_VALUES and len(texts) < len(measured):
        lines.append(
            Line("line", [ChartPoint(at[text], best[text]) for text in texts], f"the best {metric} of each value")
        )
    value, measure, name = pick(measured, key=lambda one: one[1])
    about = f"the best, {name}: {key} {_text(value)}, {metric} {compact(measure)}"
    lines.append(Line("best", [ChartPoint(at[_text(value)], measure)], about))
    return chart_of(key, lines, x=x, y=y)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _value_places(values: Sequence[str]) -> ChartAxis:
    """Return an axis with a place for each value, and labels of a few of them."""
    every = -(-len(values) // _MOST_LABELS)
    short = [text if len(text) <= _LONGEST_LABEL else f"{text[: _LONGEST_LABEL - 3]}..." for text in values]
    ticks = [Tick((number + 0.5) / len(values), text) for number, text in enumerate(short) if number % every == 0]
    return ChartAxis(0.0, float(len(values)), ticks)
