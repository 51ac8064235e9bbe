"""Loss, throughput and evaluations over the steps, read from the metrics of a run and thinned out to what a screen shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ddp_hpc.base.durable import json_line, lines_of
from ddp_hpc.base.record import record_in
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.rereading import Tail
from ddp_hpc.watch.metrics import not_finite_in, numbers_of

NUM_BINS = 400
"""How many parts of the x axis keep their first, last, lowest and highest point: about as many as a screen has columns."""
MOST_EVALUATIONS = 2000
OTHERS = ("tokens_per_s", "grad_norm", "loss_scale", "skipped_updates")
"""Numbers of logged steps besides the loss and samples a second, which only some runs have."""
_MOST_BYTES_OF_SMALL = 256 << 10
"""Of the log of a run that has a small chart among many."""


class ChartPoint(NamedTuple):
    """One value at one step."""

    step: float
    value: float


@dataclass(frozen=True, kw_only=True)
class Series:
    """The numbers of a run over its steps."""

    loss: Sequence[ChartPoint] = ()
    not_finite: Sequence[int] = ()
    """Steps whose loss was NaN or infinite, thinned out."""
    num_not_finite: int = 0
    """Before thinning."""
    ends_not_finite: bool = False
    """Whether the newest loss is not finite."""
    rate: Sequence[ChartPoint] = ()
    """Samples a second."""
    others: Mapping[str, Sequence[ChartPoint]] = field(default_factory=dict)
    """The numbers of `OTHERS` that the run has, by their names."""
    num_skipped: int | None = None
    """Updates that were skipped, before thinning; None where that was not recorded."""
    superseded: Sequence[Sequence[ChartPoint]] = ()
    """The losses of steps that a later attempt has repeated: one sequence for each attempt."""
    evaluations: dict[str, list[ChartPoint]] = field(default_factory=dict)
    """Metric -> its values."""
    broken_evaluations: dict[str, list[int]] = field(default_factory=dict)
    """Metric -> the steps at which it was NaN or infinite, thinned out."""
    num_lines: int = 0
    """Of the metrics, before thinning."""
    first_at: float | None = None
    last_at: float | None = None


@dataclass(frozen=True)
class _Line:
    """A line of the metrics; an evaluation has more numbers."""

    kind: str
    step: int
    at: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped_updates: float | None = None


def read_series(run: RunDir) -> Series:
    """Read the metrics of a run; without a file, all is empty.

    Raises:
        OSError: if the file system does not answer.
    """
    trained: list[_Line] = []
    evaluated: dict[str, list[ChartPoint]] = {}
    unevaluated: dict[str, list[int]] = {}
    num_lines = 0
    for line, raw in _lines(run.metrics):
        num_lines += 1
        if line.kind == "train":
            trained.append(line)
        elif line.kind == "eval":
            record = json_line(raw) or {}
            for name, value in numbers_of(record).items():
                evaluated.setdefault(name, []).append(ChartPoint(line.step, value))
            for name in not_finite_in(record):
                unevaluated.setdefault(name, []).append(line.step)
    broken = [line.step for line in trained if not _is_finite(line.loss)]
    skipped = [line.skipped_updates for line in trained if line.skipped_updates is not None]
    times = [line.at for line in (trained[:1] + trained[-1:]) if line.at is not None]
    return Series(
        loss=thinned(_finite((line.step, line.loss) for line in trained)),
        not_finite=_some(broken),
        num_not_finite=len(broken),
        ends_not_finite=bool(trained) and not _is_finite(trained[-1].loss),
        rate=thinned(_finite((line.step, line.samples_per_s) for line in trained)),
        others={name: points for name in OTHERS if (points := _of_steps(trained, name))},
        num_skipped=int(sum(skipped)) if skipped else None,
        superseded=[thinned(part) for part in _parts(line for line, _ in _lines(run.superseded_metrics))],
        evaluations={name: _some(points, MOST_EVALUATIONS) for name, points in evaluated.items()},
        broken_evaluations={name: _some(steps) for name, steps in unevaluated.items()},
        num_lines=num_lines,
        first_at=times[0] if times else None,
        last_at=times[-1] if times else None,
    )


def read_losses(run: RunDir, *, num_bins: int) -> Series:
    """Read the losses of a run for a small chart; of a long log, its end and evenly spaced parts.

    Raises:
        OSError: if the file system does not answer.
    """
    raws = Tail(run.metrics, most_bytes=_MOST_BYTES_OF_SMALL).new_raw_lines()
    trained = [
        line for raw in raws if (line := record_in(raw, _Line, may_have_nan=True)) is not None and line.kind == "train"
    ]
    broken = [line.step for line in trained if not _is_finite(line.loss)]
    return Series(
        loss=thinned(_finite((line.step, line.loss) for line in trained), num_bins), not_finite=_some(broken, num_bins)
    )


def _of_steps(lines: Sequence[_Line], name: str) -> list[ChartPoint]:
    return thinned(_finite((line.step, getattr(line, name)) for line in lines))


def _lines(path: Path) -> Iterator[tuple[_Line, bytes]]:
    yield from ((line, raw) for raw in lines_of(path) if (line := record_in(raw, _Line, may_have_nan=True)) is not None)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _finite(pairs: Iterable[tuple[int, float | None]]) -> list[ChartPoint]:
    return [ChartPoint(step, value) for step, value in pairs if value is not None and math.isfinite(value)]


def _parts(lines: Iterable[_Line]) -> list[list[ChartPoint]]:
    """Divide superseded lines where the steps go back or leap: there, another attempt was set aside."""
    points = [point for line in lines if line.kind == "train" for point in _finite([(line.step, line.loss)])]
    leaps = [two.step - one.step for one, two in pairwise(points) if two.step > one.step]
    longest = 4 * min(leaps, default=0)
    parts: list[list[ChartPoint]] = []
    for point in points:
        if not parts or not 0 < point.step - parts[-1][-1].step <= longest:
            parts.append([])
        parts[-1].append(point)
    return parts


def thinned(points: Sequence[ChartPoint], num_bins: int = NUM_BINS) -> list[ChartPoint]:
    """Return the first, lowest, highest and last point of each part of the x axis: a line through them looks the same.

    (Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", 2014, doi:10.14778/2732951.2732953.)
    """
    if len(points) <= 4 * num_bins:
        return [*points]
    first, last = points[0].step, points[-1].step
    width = (last - first) / num_bins or 1.0
    kept: list[ChartPoint] = []
    begin = 0
    for number in range(len(points)):
        is_end = number + 1 == len(points) or points[number + 1].step >= first + width * (
            int((points[begin].step - first) / width) + 1
        )
        if is_end:
            part = points[begin : number + 1]
            extremes = {part[0], min(part, key=_value), max(part, key=_value), part[-1]}
            kept += sorted(extremes)
            begin = number + 1
    return kept


def _value(point: ChartPoint) -> float:
    return point.value


def _some(items: Sequence[Any], most: int = NUM_BINS) -> list[Any]:
    """Return evenly spaced items, the first and the last among them."""
    if len(items) <= most:
        return [*items]
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]
