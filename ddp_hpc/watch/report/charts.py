"""Charts as plain data: lines in a box of 1000 x 1000, which the page stretches, and labels in shares of the box. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from ddp_hpc.run.run_dir.timeline import Look
from ddp_hpc.watch.report.axes import ChartAxis, Tick, compact, linear, logarithmic
from ddp_hpc.watch.report.series import ChartPoint, Series

BOX = 1000
_LOG_FROM = 20
"""A loss that falls by more than this factor has a logarithmic axis."""
_MOST_COLUMNS = 160
SHADES = (0.02, 0.05, 0.10, 0.20, 0.40)
"""Share of the step from which on each darker shade of the map stands; `slow_ranks` warns from 10 % on."""


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    kind: str
    """Its class in the style sheet."""
    path: str
    title: str


@dataclass(frozen=True)
class Dot:
    """A single value."""

    kind: str
    x: float
    y: float
    """In the box; zero is at the top."""
    title: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart."""

    title: str
    unit: str
    x: ChartAxis
    y: ChartAxis
    curves: Sequence[Curve] = ()
    dots: Sequence[Dot] = ()
    rules: Sequence[Dot] = ()
    """Vertical lines."""
    readings: Sequence[tuple[float, float]] = ()
    """Step and value of the main curve, for the pointer."""


def loss_chart(
    series: Series, starts: Mapping[int, int], axes: tuple[ChartAxis, ChartAxis] | None = None
) -> Chart | None:
    """Return the chart of the loss; None without one.

    `starts`: attempt -> the step at which it began. `axes`: those that several charts share.
    """
    lost = [point for part in series.superseded for point in part]
    evaluated = series.evaluations.get("loss", [])
    points = [*series.loss, *lost, *(point for point in evaluated if _is_finite(point.value))]
    if not points and not series.not_finite:
        return None
    x, y = axes or (_steps_axis(series), value_axis([point.value for point in points]))
    curves = [
        Curve("lost", path(part, x, y), f"steps that were repeated later: {part[0].step:g} to {part[-1].step:g}")
        for part in series.superseded
    ]
    if series.loss:
        pieces = " ".join(path(piece, x, y) for piece in _pieces(series.loss, series.not_finite))
        curves.append(Curve("main", pieces, "training loss, the mean of each log interval"))
    dots = [
        _dot("evaluation", point, x, y, f"evaluation at step {point.step:g}: loss {compact(point.value)}")
        for point in evaluated
        if _is_finite(point.value)
    ]
    dots += _broken(series.not_finite, x, "the loss")
    dots += _broken(series.broken_evaluations.get("loss", []), x, "the loss of the evaluation")
    return Chart(
        title="Loss",
        unit="logarithmic" if y.is_log else "",
        x=x,
        y=y,
        curves=curves,
        dots=dots,
        rules=_rules(starts, x),
        readings=series.loss,
    )


def shared_axes(runs: Sequence[Series]) -> tuple[ChartAxis, ChartAxis]:
    """Return axes for the losses of several runs; a run that diverges does not flatten the others, but leaves the box."""
    highest = sorted(max(point.value for point in one.loss) for one in runs if one.loss)
    lowest = min((point.value for one in runs for point in one.loss), default=0.0)
    steps = linear(0.0, max([1.0, *(one.loss[-1].step for one in runs if one.loss)]), count=3)
    return steps, value_axis([lowest, highest[len(highest) // 2]] if highest else [])


def _broken(steps: Sequence[int], x: ChartAxis, what: str) -> list[Dot]:
    return [Dot("broken", x.place(step) * BOX, 0, f"step {step}: {what} is NaN or infinite") for step in steps]


def rate_chart(series: Series, starts: Mapping[int, int]) -> Chart | None:
    """Return the chart of the throughput; None where it was not measured."""
    if not series.rate:
        return None
    x, y = _steps_axis(series), linear(0.0, 1.08 * max(point.value for point in series.rate), count=4)
    line = Curve("main", path(series.rate, x, y), "samples a second")
    return Chart(
        title="Throughput", unit="samples/s", x=x, y=y, curves=[line], rules=_rules(starts, x), readings=series.rate
    )


_OTHERS: Mapping[str, tuple[str, str, bool]] = {
    "tokens_per_s": ("Tokens", "tokens/s", False),
    "grad_norm": ("Gradient norm", "before clipping", True),
    "loss_scale": ("Loss scale", "", True),
    "skipped_updates": ("Skipped updates", "of each log interval", False),
}
"""A number of logged steps -> its title, its unit, and whether its axis may be logarithmic."""


def other_charts(series: Series, starts: Mapping[int, int]) -> list[Chart]:
    """Return a chart of each further number that the run has; none of skipped updates where none was."""
    charts = []
    for name, points in series.others.items():
        title, unit, may_be_log = _OTHERS[name]
        values = [point.value for point in points]
        if name == "skipped_updates" and not any(values):
            continue
        x = _steps_axis(series)
        y = value_axis(values) if may_be_log else linear(0.0, 1.08 * max(values), count=4)
        charts.append(
            Chart(
                title=title,
                unit=", ".join(filter(None, (unit, "logarithmic" if y.is_log else ""))),
                x=x,
                y=y,
                curves=[Curve("main", path(points, x, y), title)],
                rules=_rules(starts, x),
                readings=points,
            )
        )
    return charts


def metric_charts(series: Series, starts: Mapping[int, int]) -> list[Chart]:
    """Return a chart of each metric of the evaluations besides the loss."""
    charts = []
    for name, points in series.evaluations.items():
        finite = [point for point in points if _is_finite(point.value)]
        if name == "loss" or not finite:
            continue
        x, y = _steps_axis(series), value_axis([point.value for point in finite], may_be_log=False)
        dots = [
            _dot("evaluation", point, x, y, f"step {point.step:g}: {name} {compact(point.value)}") for point in finite
        ]
        dots += _broken(series.broken_evaluations.get(name, []), x, name)
        charts.append(
            Chart(
                title=name,
                unit="evaluation",
                x=x,
                y=y,
                curves=[Curve("main", path(finite, x, y), name)],
                dots=dots,
                rules=_rules(starts, x),
                readings=finite,
            )
        )
    return charts


def _steps_axis(series: Series) -> ChartAxis:
    ends = [
        points[-1].step
        for points in (series.loss, series.rate, *series.superseded, *series.evaluations.values())
        if points
    ]
    broken = (step for steps in series.broken_evaluations.values() for step in steps)
    return linear(0.0, max([1.0, *ends, *series.not_finite, *broken]))


def value_axis(values: Sequence[float], *, may_be_log: bool = True) -> ChartAxis:
    """Return an axis that holds all these values; logarithmic where they are above zero, and far from each other."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if may_be_log and low > 0 and high / low > _LOG_FROM:
        return logarithmic(low / 1.15, high * 1.15)
    margin = (high - low) * 0.06
    return linear(max(0.0, low - margin) if low >= 0 else low - margin, high + margin, count=4)


def _is_finite(value: float) -> bool:
    return value - value == 0


def path(points: Iterable[ChartPoint], x: ChartAxis, y: ChartAxis) -> str:
    """Return the points as an SVG path; whole numbers are fine enough in a box of 1000."""
    places = [f"{x.place(one.step) * BOX:.0f} {(1 - y.place(one.value)) * BOX:.0f}" for one in points]
    kept = [place for number, place in enumerate(places) if number == 0 or place != places[number - 1]]
    # A single point is a line of no length, which a round cap draws as a dot.
    return f"M{kept[0]}" + ("".join(f"L{one}" for one in kept[1:]) or "h0") if kept else ""


def _pieces(points: Sequence[ChartPoint], breaks: Sequence[int]) -> list[list[ChartPoint]]:
    """Divide points where steps without a value lie between two of them."""
    pieces: list[list[ChartPoint]] = []
    for number, one in enumerate(points):
        before = bisect_right(breaks, points[number - 1].step) if number else -1
        if before != bisect_right(breaks, one.step):
            pieces.append([])
        pieces[-1].append(one)
    return pieces


def _dot(kind: str, point: ChartPoint, x: ChartAxis, y: ChartAxis, title: str) -> Dot:
    return Dot(kind, x.place(point.step) * BOX, (1 - y.place(point.value)) * BOX, title)


def _rules(starts: Mapping[int, int], x: ChartAxis) -> list[Dot]:
    return [
        Dot("start", x.place(step) * BOX, 0, f"attempt {attempt} begins after step {step}")
        for attempt, step in starts.items()
        if attempt
    ]


# --- the map of waits --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WaitRow:
    """One rank in the map."""

    rank: int
    node: str
    worst: float
    """The largest share of a step for which the others waited for it."""
    title: str


@dataclass(frozen=True, kw_only=True)
class WaitMap:
    """Ranks x time: how long the others waited for each rank."""

    rows: Sequence[WaitRow]
    num_columns: int
    shades: Sequence[str]
    """A path for each shade, the lightest first, in a box of columns x ranks."""
    ticks: Sequence[Tick]
    rules: Sequence[tuple[float, str]]
    """Where an attempt begins: in columns, and its name."""
    labels: Sequence[tuple[float, str]]
    """Where in the height the name of a rank stands: of all if they are few."""
    num_looks: int


def wait_map(looks: Sequence[Look]) -> WaitMap | None:
    """Return the map; None where the ranks were never compared."""
    if not looks:
        return None
    columns = _columns(looks)
    ranks = sorted({rank for look in looks for rank in look.lost_s})
    nodes = {rank: node for look in looks for rank, node in look.nodes.items()}
    shares = [
        [max(0.0, fmean(look.lost_s.get(rank, 0.0) / (look.step_s or 1.0) for look in part)) for part in columns]
        for rank in ranks
    ]
    rows = [
        WaitRow(
            rank=rank, node=nodes.get(rank, ""), worst=max(of_rank), title=_row_title(rank, nodes.get(rank, ""), looks)
        )
        for rank, of_rank in zip(ranks, shares, strict=True)
    ]
    every = max(1, -(-len(ranks) // 16))
    return WaitMap(
        rows=rows,
        num_columns=len(columns),
        shades=[_shade(shares, number) for number in range(len(SHADES))],
        ticks=_column_ticks(columns),
        rules=[
            (number, f"attempt {part[0].attempt}")
            for number, part in enumerate(columns)
            if number and part[0].attempt != columns[number - 1][0].attempt
        ],
        labels=[((number + 0.5) / len(ranks), f"{rank}") for number, rank in enumerate(ranks) if number % every == 0],
        num_looks=len(looks),
    )


def _columns(looks: Sequence[Look]) -> list[list[Look]]:
    """Put neighbours of one attempt together until the columns are few enough."""
    each = -(-len(looks) // _MOST_COLUMNS)
    columns: list[list[Look]] = []
    for look in looks:
        if not columns or len(columns[-1]) >= each or columns[-1][0].attempt != look.attempt:
            columns.append([])
        columns[-1].append(look)
    return columns


def _shade(shares: Sequence[Sequence[float]], number: int) -> str:
    """Return the cells of one shade as a path; neighbours in a row are one piece."""
    low, high = SHADES[number], [*SHADES, float("inf")][number + 1]
    parts = []
    for row, of_rank in enumerate(shares):
        begin = None
        for column, share in enumerate([*of_rank, -1.0]):
            if low <= share < high:
                begin = column if begin is None else begin
            elif begin is not None:
                parts.append(f"M{begin} {row}h{column - begin}v1h-{column - begin}z")
                begin = None
    return "".join(parts)


def _row_title(rank: int, node: str, looks: Sequence[Look]) -> str:
    lost = [look.lost_s[rank] for look in looks if rank in look.lost_s]
    where = f" on {node}" if node else ""
    return f"rank {rank}{where}: {median(lost) * 1000:+.1f} ms a step beside the middle rank, at most {max(lost) * 1000:+.1f} ms"


def _column_ticks(columns: Sequence[Sequence[Look]]) -> list[Tick]:
    count = min(5, len(columns))
    numbers = sorted({round(number * (len(columns) - 1) / max(1, count - 1)) for number in range(count)})
    steps = [columns[one][0].step for one in numbers]
    texts = ["?" if step is None else compact(step) for step in steps]
    return [Tick((one + 0.5) / len(columns), text) for one, text in zip(numbers, texts, strict=True)]


# --- phases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseShare:
    """One phase of the loop."""

    name: str
    ms: float
    """A step, of rank zero."""
    share: float
    spread_ms: tuple[float, float] | None = field(default=None)
    """Of the quickest and the slowest rank, a step."""


def phase_shares(seconds: Mapping[str, float], num_steps: int, looks: Sequence[Look]) -> list[PhaseShare]:
    """Return the phases of rank zero's steps, the longest first, and how far the ranks differ in each."""
    total = sum(seconds.values())
    if not num_steps or total <= 0:
        return []
    spread = {
        name: (
            median(look.phases[name][0] for look in with_it) * 1000,
            median(look.phases[name][-1] for look in with_it) * 1000,
        )
        for name in seconds
        if (with_it := [look for look in looks if len(look.phases.get(name, ())) == 3])
    }
    found = [
        PhaseShare(name, one / num_steps * 1000, one / total, spread.get(name))
        for name, one in seconds.items()
        if one > 0
    ]
    return sorted(found, key=lambda one: -one.share)
