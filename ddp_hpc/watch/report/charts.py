"""Charts as plain data: SVG paths in a box of 1000 x 1000, which the page stretches, and labels in shares of the box. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from ddp_hpc.watch.report.axes import ChartAxis, axis
from ddp_hpc.watch.report.series import ChartPoint, Series, finite_points
from ddp_hpc.watch.report.words import compact

BOX = 1000
_MOST_READINGS = 500


class Line(NamedTuple):
    """What is drawn of some points: a line through them, with a gap at each NaN; a point alone is a dot."""

    kind: str
    """Its class in the style sheet."""
    points: Sequence[ChartPoint]
    """Infinite values stand at the ends of the axis."""
    title: str


GAP = ChartPoint(0, math.nan)


@dataclass(frozen=True)
class Chart:
    """Some lines, and the axes that they are drawn between."""

    title: str
    lines: Sequence[Line]
    x: ChartAxis
    y: ChartAxis
    unit: str = ""

    @property
    def description(self) -> str:
        """The unit, and which axes are logarithmic."""
        scales = [f"{name} axis logarithmic" for name, one in (("x", self.x), ("y", self.y)) if one.is_log]
        return ", ".join(filter(None, [self.unit, *scales]))

    @property
    def readings(self) -> list[tuple[float, float]]:
        """Steps and values of the main line, for the pointer."""
        main = [point for line in self.lines if line.kind == "main" for point in finite_points(line.points)]
        return [(one.step, float(f"{one.value:.5g}")) for one in main[:: -(-len(main) // _MOST_READINGS) or 1]]

    def path(self, points: Iterable[ChartPoint]) -> str:
        """Return the points as an SVG path; whole numbers are fine enough in a box of 1000."""
        pieces = []
        for is_gap, piece in groupby(points, key=lambda point: math.isnan(point.value)):
            if not is_gap:
                places = (
                    f"{self.x.place(one.step) * BOX:.0f} {(1 - self.y.place(one.value)) * BOX:.0f}" for one in piece
                )
                different = [place for place, _ in groupby(places)]
                # A single point is a line of no length, which a round cap draws as a dot.
                pieces.append("M" + "L".join(different) + ("h0" if len(different) == 1 else ""))
        return "".join(pieces)


def chart_of(
    title: str, lines: Sequence[Line], *, unit: str = "", may_be_log: bool = False, y: ChartAxis | None = None
) -> Chart:
    """Return a chart of these lines over steps from 0; where no axis is given, it holds all values."""
    points = [point for line in lines for point in line.points]
    x = axis([0.0, 1.0, *(point.step for point in points)], margin=0.0, count=5)
    return Chart(title, lines, x, y or axis((point.value for point in points), may_be_log=may_be_log), unit)


_NUMBERS: Mapping[str, tuple[str, str, bool]] = {
    "samples_per_s": ("Throughput", "samples/s", False),
    "lr": ("Learning rate", "", False),
    "tokens_per_s": ("Tokens", "tokens/s", False),
    "grad_norm": ("Gradient norm", "before clipping", True),
    "loss_scale": ("Loss scale", "", True),
    "skipped_updates": ("Skipped updates", "of each log interval", False),
}
"""A number of logged steps -> its title, its unit, and whether its axis may be logarithmic; else it begins at 0."""


def charts_of(series: Series, starts: Mapping[int, int]) -> list[Chart]:
    """Return a chart of the loss, of each metric of the evaluations, and of each number that the run has logged.

    `starts`: attempt -> the step at which it began.
    """
    rules = [
        Line(
            "start",
            [ChartPoint(step, -math.inf), ChartPoint(step, math.inf)],
            f"attempt {one} begins after step {step}",
        )
        for one, step in starts.items()
        if one
    ]
    loss = loss_lines(series)
    found = [chart_of("Loss", [*loss, *rules], may_be_log=True)] if loss else []
    for name, points in series.evaluations.items():
        if name != "loss" and finite_points(points):
            found.append(
                chart_of(name, [Line("main", points, name), *_evaluations(name, points), *rules], unit="evaluation")
            )
    for name, (title, unit, may_be_log) in _NUMBERS.items():
        points = series.numbers.get(name, ())
        values = [point.value for point in finite_points(points)]
        if values and (name != "skipped_updates" or any(values)):
            y = axis(values if may_be_log else [*values, 0.0], may_be_log=may_be_log)
            found.append(chart_of(title, [Line("main", points, title), *rules], unit=unit, y=y))
    return found


def loss_lines(series: Series) -> list[Line]:
    """Return the lines of the loss: what was trained, what was repeated, evaluations, and steps without a value."""
    lines = [
        Line("lost", part, f"steps that were repeated later: {part[0].step:g} to {part[-1].step:g}")
        for part in series.superseded
    ]
    if finite_points(series.loss):
        lines.append(Line("main", series.loss, "training loss, the mean of each log interval"))
    return [*lines, *_gap_lines("the loss", series.loss), *_evaluations("loss", series.evaluations.get("loss", ()))]


def _evaluations(name: str, points: Sequence[ChartPoint]) -> list[Line]:
    shown = [
        Line("evaluation", [one], f"evaluation at step {one.step:g}: {name} {compact(one.value)}")
        for one in finite_points(points)
    ]
    return [*shown, *_gap_lines(f"the {name} of the evaluation", points)]


def _gap_lines(what: str, points: Sequence[ChartPoint]) -> list[Line]:
    return [
        Line("broken", [ChartPoint(one.step, math.inf)], f"step {one.step:g}: {what} is NaN or infinite")
        for one in points
        if math.isnan(one.value)
    ]
