"""Parse Slurm's durations and points in time."""

from __future__ import annotations

import re
import time

_DURATION = re.compile(
    r"(?:(?P<days>\d{1,9})-)?(?P<first>\d{1,9})(?::(?P<second>\d{1,9}))?(?::(?P<third>\d{1,9}))?", re.ASCII
)


def parse_seconds(text: str) -> int | None:
    """Return the length of `1-02:03:04`, `02:03:04`, `03:04`, `5` or `1-02`; None for a word such as `UNLIMITED`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    # A single number means minutes; after days it means hours: https://slurm.schedmd.com/sbatch.html#OPT_time
    first, second, third = (int(found[part] or 0) for part in ("first", "second", "third"))
    if found["days"]:
        return int(found["days"]) * 86400 + first * 3600 + second * 60 + third
    if found["third"]:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def parse_minutes(text: str) -> float | None:
    """Return a duration in minutes; None if there is no limit."""
    length_s = parse_seconds(text)
    return None if length_s is None else length_s / 60


def parse_time(text: str) -> float | None:
    """Return `2026-11-21T07:00:00` in seconds since the epoch; None for `Unknown` and other words."""
    # Slurm's commands write times in the zone of the host that they run on, and do not name it; so does time.mktime read
    # them. A time that another host wrote is not comparable.
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None
