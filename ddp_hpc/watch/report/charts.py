"""Charts as plain data: SVG paths in a box of 1000 x 1000, which the page stretches, and labels in shares of the box. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, median
from typing import NamedTuple

from ddp_hpc.run.run_dir.timeline import Look
from ddp_hpc.watch.report.axes import ChartAxis, Tick, axis
from ddp_hpc.watch.report.series import ChartPoint, Series, finite
from ddp_hpc.watch.report.words import compact

BOX = 1000
_MOST_COLUMNS = 160
SHADES = (0.02, 0.05, 0.10, 0.20, 0.40)
"""Share of the step from which on each darker shade of the map stands; `slow_ranks` warns from 10 % on."""


class Line(NamedTuple):
    """What is drawn of some points: a line through them, with a gap at each NaN; a point alone is a dot."""

    kind: str
    """Its class in the style sheet."""
    points: Sequence[ChartPoint]
    """Infinite values stand at the ends of the axis."""
    title: str


GAP = ChartPoint(0, math.nan)


class Shape(NamedTuple):
    """A part of a chart, as an SVG path."""

    kind: str
    path: str
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart."""

    title: str
    unit: str
    x: ChartAxis
    y: ChartAxis
    shapes: Sequence[Shape]
    readings: Sequence[ChartPoint] = ()
    """The values of the main line, for the pointer."""


def chart_of(  # noqa: PLR0913
    title: str,
    lines: Sequence[Line],
    *,
    unit: str = "",
    may_be_log: bool = False,
    x: ChartAxis | None = None,
    y: ChartAxis | None = None,
) -> Chart:
    """Return a chart of these lines. Where no axes are given, it is over steps from 0, and holds all values."""
    points = [point for line in lines for point in line.points]
    x = x or axis([0.0, 1.0, *(point.step for point in points)], margin=0.0, count=5)
    y = y or axis((point.value for point in points), may_be_log=may_be_log)
    scales = [f"{name} axis logarithmic" for name, one in (("x", x), ("y", y)) if one.is_log]
    return Chart(
        title=title,
        unit=", ".join([*filter(None, [unit]), *scales]),
        x=x,
        y=y,
        shapes=[Shape(line.kind, path(line.points, x, y), line.title) for line in lines],
        readings=[point for line in lines if line.kind == "main" for point in finite(line.points)],
    )


def path(points: Iterable[ChartPoint], x: ChartAxis, y: ChartAxis) -> str:
    """Return the points as an SVG path; whole numbers are fine enough in a box of 1000."""
    pieces = []
    for is_gap, piece in groupby(points, key=lambda point: math.isnan(point.value)):
        if not is_gap:
            places = (f"{x.place(one.step) * BOX:.0f} {(1 - y.place(one.value)) * BOX:.0f}" for one in piece)
            different = [place for place, _ in groupby(places)]
            # A single point is a line of no length, which a round cap draws as a dot.
            pieces.append("M" + "L".join(different) + ("h0" if len(different) == 1 else ""))
    return "".join(pieces)


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
        if name != "loss" and finite(points):
            found.append(
                chart_of(name, [Line("main", points, name), *_evaluations(name, points), *rules], unit="evaluation")
            )
    for name, (title, unit, may_be_log) in _NUMBERS.items():
        points = series.numbers.get(name, ())
        values = [point.value for point in finite(points)]
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
    if finite(series.loss):
        lines.append(Line("main", series.loss, "training loss, the mean of each log interval"))
    return [*lines, *_broken("the loss", series.loss), *_evaluations("loss", series.evaluations.get("loss", ()))]


def _evaluations(name: str, points: Sequence[ChartPoint]) -> list[Line]:
    shown = [
        Line("evaluation", [one], f"evaluation at step {one.step:g}: {name} {compact(one.value)}")
        for one in finite(points)
    ]
    return [*shown, *_broken(f"the {name} of the evaluation", points)]


def _broken(what: str, points: Sequence[ChartPoint]) -> list[Line]:
    return [
        Line("broken", [ChartPoint(one.step, math.inf)], f"step {one.step:g}: {what} is NaN or infinite")
        for one in points
        if math.isnan(one.value)
    ]


# --- the map of waits --------------------------------------------------------------------------------------------------


def wait_map(looks: Sequence[Look]) -> Chart:
    """Return the map of ranks x time: the darker a cell, the longer the others waited for the rank."""
    columns = _columns(looks)
    ranks = sorted({rank for look in looks for rank in look.lost_s})
    nodes = {rank: node for look in looks for rank, node in look.nodes.items()}
    width, height = BOX / len(columns), BOX / len(ranks)
    cells: dict[int, list[str]] = {}
    for row, rank in enumerate(ranks):
        shares = [fmean(look.lost_s.get(rank, 0.0) / (look.step_s or 1.0) for look in part) for part in columns]
        shades = [sum(share >= low for low in SHADES) for share in shares]
        begin = 0
        for shade, equal in groupby(shades):
            count = len([*equal])
            cells.setdefault(shade, []).append(_box(begin * width, row * height, count * width, height))
            begin += count
    shapes = [Shape(f"shade-{shade - 1}", "".join(boxes)) for shade, boxes in cells.items() if shade]
    shapes += [
        Shape("hit", _box(0, row * height, BOX, height), _about_rank(rank, nodes.get(rank, ""), looks))
        for row, rank in enumerate(ranks)
    ]
    shapes += [
        Shape("start", f"M{number * width:.1f} 0V{BOX}", f"attempt {part[0].attempt}")
        for number, part in enumerate(columns)
        if number and part[0].attempt != columns[number - 1][0].attempt
    ]
    every = max(1, -(-len(ranks) // 16))
    labels = [Tick(1 - (row + 0.5) / len(ranks), f"{rank}") for row, rank in enumerate(ranks) if row % every == 0]
    ticks = {round(number * (len(columns) - 1) / 4) for number in range(5)}
    steps = [
        Tick((one + 0.5) / len(columns), "?" if (step := columns[one][0].step) is None else compact(step))
        for one in sorted(ticks)
    ]
    x, y = ChartAxis(0, len(columns), steps), ChartAxis(0, len(ranks), labels)
    return Chart(title="", unit="", x=x, y=y, shapes=shapes)


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z"


def _columns(looks: Sequence[Look]) -> list[list[Look]]:
    """Put neighbours of one attempt together until the columns are few enough."""
    each = -(-len(looks) // _MOST_COLUMNS)
    columns: list[list[Look]] = []
    for look in looks:
        if not columns or len(columns[-1]) >= each or columns[-1][0].attempt != look.attempt:
            columns.append([])
        columns[-1].append(look)
    return columns


def _about_rank(rank: int, node: str, looks: Sequence[Look]) -> str:
    lost = [look.lost_s[rank] for look in looks if rank in look.lost_s]
    where = f" on {node}" if node else ""
    return f"rank {rank}{where}: {median(lost) * 1000:+.1f} ms a step beside the middle rank, at most {max(lost) * 1000:+.1f} ms"


# --- phases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseShare:
    """One phase of the loop."""

    name: str
    ms: float
    """A step, of rank zero."""
    share: float
    spread_ms: tuple[float, float] | None
    """Of the quickest and the slowest rank, a step."""


def phase_shares(seconds: Mapping[str, float], num_steps: int, looks: Sequence[Look]) -> list[PhaseShare]:
    """Return the phases of rank zero's steps, the longest first, and how far the ranks differ in each."""
    total = sum(seconds.values())
    if not num_steps or total <= 0:
        return []
    found = []
    for name, one in sorted(seconds.items(), key=lambda item: -item[1]):
        of_ranks = [look.phases[name] for look in looks if len(look.phases.get(name, ())) == 3]
        spread = (
            (median(low for low, _, _ in of_ranks) * 1000, median(high for *_, high in of_ranks) * 1000)
            if of_ranks
            else None
        )
        if one > 0:
            found.append(PhaseShare(name, one / num_steps * 1000, one / total, spread))
    return found
