"""Slurm's ways to write a time: durations, moments, and the words for none."""

from __future__ import annotations

import re
import time

from ddp_hpc.errors import ConfigError

_NO_DURATION = frozenset({"", "INFINITE", "INVALID", "N/A", "NONE", "NOT_SET", "PARTITION_LIMIT", "UNLIMITED"})
_NO_MOMENT = frozenset({"", "N/A", "NONE", "UNKNOWN"})
_DURATION = re.compile(
    r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?(?:\.\d+)?", re.ASCII
)


def seconds(text: str) -> int | None:
    """Return how long `1-02:03:04`, `02:03:04`, `03:04`, `5` (minutes) or `1-02` (a day, two hours) is.

    None for no limit (`UNLIMITED`), and where Slurm has no duration to tell (`N/A`, `NONE`).

    Raises:
        ConfigError: where it is none of these.
    """
    if text.strip().upper() in _NO_DURATION:
        return None
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{text!r} is no duration that Slurm writes, such as '1-02:03:04' or 'UNLIMITED'.")
    first, second, third = (int(found[part] or 0) for part in ("first", "second", "third"))
    if found["days"]:
        return int(found["days"]) * 86400 + first * 3600 + second * 60 + third
    if found["third"]:
        return first * 3600 + second * 60 + third
    return first * 60 + second


def minutes(text: str) -> int | None:
    """Return how many minutes a duration is, rounded up, as Slurm does."""
    length_s = seconds(text)
    return None if length_s is None else -(-length_s // 60)


def moment(text: str) -> float | None:
    """Return the seconds since the epoch of `2026-11-21T07:00:00`, this host's time; None for `Unknown` and its like.

    Raises:
        ConfigError: where it is none of these.
    """
    if text.strip().upper() in _NO_MOMENT:
        return None
    try:
        return time.mktime(time.strptime(text.strip(), "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{text!r} is no time that Slurm writes, such as '2026-11-21T07:00:00'.") from error
