"""Slurm's ways to write a time: durations, moments, and the words for none."""

from __future__ import annotations

import re
import time

_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?", re.ASCII)


def seconds(text: str) -> int | None:
    """Return how long `1-02:03:04`, `02:03:04`, `03:04`, `5` or `1-02` is; None for any word, as `UNLIMITED`.

    Alone, a number is of minutes; behind days, of hours (sbatch(1), `--time`).
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    first, second, third = (int(found[part] or 0) for part in ("first", "second", "third"))
    if found["days"]:
        return int(found["days"]) * 86400 + first * 3600 + second * 60 + third
    if found["third"]:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def minutes(text: str) -> float | None:
    """Return a duration in minutes; None for no limit."""
    length_s = seconds(text)
    return None if length_s is None else length_s / 60


def moment(text: str) -> float | None:
    """Return the seconds since the epoch of `2026-11-21T07:00:00`, this host's time; None for `Unknown` and its like."""
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
