"""Measuring side by side: every row once a round, in a new order each round, judged by ratios within rounds."""

from __future__ import annotations

import gc
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

PACKAGES = ("ddp_hpc", "torch", "lightning", "accelerate", "safetensors", "xxhash", "msgspec")
NUM_RESAMPLES = 2000
MIN_ROUNDS = 10
"""Rounds from which on an interval of medians says something; below, the least and the most of all rounds are told."""


@dataclass(frozen=True)
class Row:
    """One thing measured in every round; it returns its figures by name, in seconds unless the name says otherwise."""

    name: str
    measure: Callable[[], Mapping[str, float]]


@dataclass
class Samples:
    """Every figure of every row, round by round: `by_row[row][figure]` is a list."""

    by_row: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, row: str, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self.by_row.setdefault(row, {}).setdefault(name, []).append(value)

    def has(self, row: str, figure: str) -> bool:
        return figure in self.by_row[row]

    def median(self, row: str, figure: str) -> float:
        return statistics.median(self.by_row[row][figure])

    def ratios(self, figure: str, *, over: str, under: str) -> list[float]:
        """Return, round by round, one row's figure divided by another's."""
        pairs = zip(self.by_row[over][figure], self.by_row[under][figure], strict=True)
        return [one / other for one, other in pairs]

    def median_ratio(self, figure: str, *, over: str, under: str) -> float:
        return statistics.median(self.ratios(figure, over=over, under=under))

    def differences(self, figure: str, *, of: str, less: str) -> list[float]:
        """Return, round by round, one row's figure less another's."""
        pairs = zip(self.by_row[of][figure], self.by_row[less][figure], strict=True)
        return [one - other for one, other in pairs]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was measured, beside its target if it has one."""

    claim: str
    measured: float
    """The median over the rounds."""
    between: tuple[float, float]
    """95 % of the medians of rounds drawn anew (bootstrap) lie in here; below `MIN_ROUNDS`, all rounds do."""
    unit: str
    target: str | None = None
    """`at least 5 x`."""
    met: bool | None = None


def judge(
    claim: str,
    values: Sequence[float],
    *,
    unit: str = "x",
    limit: float | None = None,
    wanted: Literal["at least", "at most"] = "at least",
) -> Verdict:
    """Hold the median of `values`, one a round, against `limit`."""
    measured = statistics.median(values)
    met = None if limit is None else (measured >= limit if wanted == "at least" else measured <= limit)
    target = None if limit is None else f"{wanted} {limit:g} {unit}"
    return Verdict(claim=claim, measured=measured, between=_interval(values), unit=unit, target=target, met=met)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < MIN_ROUNDS:
        return min(values), max(values)
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(NUM_RESAMPLES))
    return medians[NUM_RESAMPLES // 40], medians[-1 - NUM_RESAMPLES // 40]


@dataclass(frozen=True)
class Column:
    """One column of a table: what it shows of a row, or None where the row has no such figure."""

    heading: str
    value: Callable[[Samples, str], float | None]
    digits: int = 2


def shown(heading: str, figure: str, *, scale: float = 1.0, digits: int = 2) -> Column:
    """Return a column of medians."""
    return Column(heading, lambda samples, row: _if_any(samples, row, figure, samples.median, scale), digits)


def _if_any(
    samples: Samples, row: str, figure: str, statistic: Callable[[str, str], float], scale: float
) -> float | None:
    return statistic(row, figure) * scale if samples.has(row, figure) else None


def compared(heading: str, figure: str, *, under: str, digits: int = 2, is_inverse: bool = False) -> Column:
    """Return a column of median ratios to the row `under`, or of that row to each."""

    def value(samples: Samples, row: str) -> float | None:
        if not samples.has(row, figure):
            return None
        over, base = (under, row) if is_inverse else (row, under)
        return samples.median_ratio(figure, over=over, under=base)

    return Column(heading, value, digits)


def added(heading: str, figure: str, *, to: str, digits: int = 0) -> Column:
    """Return a column of median differences to the row `to`."""

    def value(samples: Samples, row: str) -> float | None:
        if not samples.has(row, figure):
            return None
        return statistics.median(samples.differences(figure, of=row, less=to))

    return Column(heading, value, digits)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One of the things that `run.py` measures."""

    name: str
    title: str
    rounds: int
    measure: Callable[[int], Samples]
    columns: Sequence[Column]
    verdicts: Callable[[Samples], list[Verdict]]
    remarks: tuple[str, Callable[[], Mapping[str, str]]] | None = None
    """A heading, and a function that returns the text below it for each row."""


def run_rounds(title: str, rows: Sequence[Row], *, rounds: int, warm_up: int = 1) -> Samples:
    """Measure all rows `rounds` times in shuffled order, after rounds that do not count."""
    samples = Samples({row.name: {} for row in rows})
    order = random.Random(0)
    for number in range(-warm_up, rounds):
        said = f"{title}: round {number + 1} of {rounds}" if number >= 0 else f"{title}: warming up"
        for row in order.sample(rows, len(rows)):
            _say(said, row.name)
            gc.collect()
            figures = row.measure()
            if number >= 0:
                samples.add(row.name, figures)
        _say(said)
    _say()
    return samples


def _say(said: str = "", row: str | None = None) -> None:
    """Keep one line of progress on a terminal; elsewhere write one a round."""
    if sys.stderr.isatty():
        text = f"{said}: {row}" if row else said
        sys.stderr.write(f"\r{text:100s}\r")
    elif said and row is None:
        sys.stderr.write(f"{said} done\n")
    sys.stderr.flush()


def surroundings() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": _versions(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _commit() -> str:
    """Return the commit that is measured, or nothing outside of a checkout."""
    argv = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(argv, check=False, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
