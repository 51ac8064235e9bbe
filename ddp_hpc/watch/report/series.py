"""Loss, throughput and evaluations over the steps, read from the metrics of a run and thinned out to what a screen shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

from ddp_hpc.base.durable import lines_of, read_line
from ddp_hpc.base.record import decode_record
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import Tail
from ddp_hpc.run.run_dir.records import NON_METRIC_FIELDS

NUM_BINS = 400
"""How many parts of the x axis keep their first, last, lowest and highest point: about as many as a screen has columns."""
MOST_EVALUATIONS = 2000
_SMALL_CHART_MAX_BYTES = 256 << 10
"""Of the log of a run that has a small chart among many."""


class ChartPoint(NamedTuple):
    """One value at one step; NaN where it was NaN or infinite."""

    step: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Series:
    """The numbers of a run over its steps, thinned out."""

    numbers: Mapping[str, Sequence[ChartPoint]] = field(default_factory=dict)
    """What was logged in training, by name."""
    num_not_finite: int = 0
    """Losses that were NaN or infinite, before thinning."""
    ends_not_finite: bool = False
    """Whether the newest loss is not finite."""
    num_skipped: int | None = None
    """Updates that were skipped, before thinning; None where that was not recorded."""
    superseded: Sequence[Sequence[ChartPoint]] = ()
    """The losses of steps that a later attempt has repeated: one sequence for each attempt."""
    evaluations: Mapping[str, Sequence[ChartPoint]] = field(default_factory=dict)
    """Metric -> its values."""
    num_lines: int = 0
    """Of the metrics, before thinning."""

    @property
    def loss(self) -> Sequence[ChartPoint]:
        return self.numbers.get("loss", ())


@dataclass(frozen=True)
class MetricsLine:
    """A line of the metrics; an evaluation has more numbers."""

    kind: str
    step: int
    at: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    lr: float | None = None
    tokens_per_s: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped_updates: float | None = None


_NUMBER_NAMES = [one.name for one in fields(MetricsLine)[3:]]


def read_series(run: RunDir) -> Series:
    """Read the metrics of a run; without a file, all is empty.

    Raises:
        OSError: if the file system does not answer.
    """
    trained: dict[str, list[ChartPoint]] = {}
    evaluated: dict[str, list[ChartPoint]] = {}
    num_lines = 0
    for line, raw in parse_lines(lines_of(run.metrics)):
        num_lines += 1
        if line.kind == "train":
            for name in _NUMBER_NAMES:
                value = getattr(line, name)
                if value is not None or name == "loss":
                    trained.setdefault(name, []).append(_point(line.step, value))
        elif line.kind == "eval":
            for name, value in (read_line(raw) or {}).items():
                if name not in NON_METRIC_FIELDS and (value is None or isinstance(value, (int, float))):
                    evaluated.setdefault(name, []).append(_point(line.step, value))
    losses, skipped = trained.get("loss", []), trained.get("skipped_updates")
    return Series(
        numbers={name: thin_out(points) for name, points in trained.items()},
        num_not_finite=sum(math.isnan(point.value) for point in losses),
        ends_not_finite=bool(losses) and math.isnan(losses[-1].value),
        num_skipped=None if skipped is None else int(sum(point.value for point in finite_points(skipped))),
        superseded=[
            thin_out(part)
            for part in _split_attempts(line for line, _ in parse_lines(lines_of(run.superseded_metrics)))
        ],
        evaluations={name: _evenly_spaced(points, MOST_EVALUATIONS) for name, points in evaluated.items()},
        num_lines=num_lines,
    )


def read_losses(run: RunDir, *, num_bins: int) -> Series:
    """Read the losses of a run for a small chart; of a long log, its end and evenly spaced parts.

    Raises:
        OSError: if the file system does not answer.
    """
    raws = Tail(run.metrics, most_bytes=_SMALL_CHART_MAX_BYTES).new_raw_lines()
    losses = [_point(line.step, line.loss) for line, _ in parse_lines(raws) if line.kind == "train"]
    return Series(numbers={"loss": thin_out(losses, num_bins)})


def parse_lines(raws: Iterable[bytes]) -> Iterator[tuple[MetricsLine, bytes]]:
    """Yield the lines that are whole, each beside its bytes."""
    for raw in raws:
        if (line := decode_record(raw, MetricsLine, may_have_nan=True)) is not None:
            yield line, raw


def _point(step: int, value: float | None) -> ChartPoint:
    return ChartPoint(step, value if value is not None and math.isfinite(value) else math.nan)


def finite_points(points: Iterable[ChartPoint]) -> list[ChartPoint]:
    """Return the points that have a value."""
    return [point for point in points if math.isfinite(point.value)]


def _split_attempts(lines: Iterable[MetricsLine]) -> list[list[ChartPoint]]:
    """Divide superseded lines where the steps go back or leap: there, another attempt was set aside."""
    points = finite_points(_point(line.step, line.loss) for line in lines if line.kind == "train")
    leaps = [two.step - one.step for one, two in pairwise(points) if two.step > one.step]
    longest = 4 * min(leaps, default=0)
    parts: list[list[ChartPoint]] = []
    for point in points:
        if not parts or not 0 < point.step - parts[-1][-1].step <= longest:
            parts.append([])
        parts[-1].append(point)
    return parts


def thin_out(points: Sequence[ChartPoint], num_bins: int = NUM_BINS) -> list[ChartPoint]:
    """Return the first, lowest, highest and last point of each part of the x axis, and evenly spaced ones of those that are NaN.

    A line through them looks the same.
    (Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", 2014, doi:10.14778/2732951.2732953.)
    """
    if len(points) <= 4 * num_bins:
        return [*points]
    first, last = points[0].step, points[-1].step
    width = (last - first) / num_bins or 1.0
    kept = _evenly_spaced([point for point in points if math.isnan(point.value)], num_bins)
    value = attrgetter("value")
    for _, group in groupby(finite_points(points), key=lambda point: int((point.step - first) / width)):
        part = [*group]
        kept += {part[0], min(part, key=value), max(part, key=value), part[-1]}
    return sorted(kept, key=lambda point: point.step)


def _evenly_spaced(items: Sequence[Any], most: int = NUM_BINS) -> list[Any]:
    """Return evenly spaced items, the first and the last among them."""
    if len(items) <= most:
        return [*items]
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]
