"""The numbers in one line of a run's metrics."""

from __future__ import annotations

import math
from typing import Any

from ddp_hpc.run.run_dir.records import LINE_FIELDS


def numbers_of(line: dict[str, Any]) -> dict[str, float]:
    """Return a line's numbers, without the step, epoch and time at which they were measured."""
    return {name: value for name, value in line.items() if name not in LINE_FIELDS and isinstance(value, (int, float))}


def not_finite_in(line: dict[str, Any]) -> list[str]:
    """Return the names of a line's numbers that were NaN or infinite, for which the run writes null."""
    values = {name: value for name, value in line.items() if name not in LINE_FIELDS}
    return [
        name
        for name, value in values.items()
        if value is None or (isinstance(value, float) and not math.isfinite(value))
    ]
