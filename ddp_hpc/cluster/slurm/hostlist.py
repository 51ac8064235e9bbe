"""Expand Slurm's compressed host lists (`n[1-3]`) into names, and compress names, without a call of `scontrol`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from ddp_hpc.base.errors import ConfigError

MAX_RANGE = 65536
"""The most hosts that Slurm takes in one range."""
MAX_HOSTS = 1 << 18
"""The most names that a list may stand for: more than any cluster has nodes."""

_NAME = re.compile(r"((?:[^][,\s]+|\[[^][\s]*\])+)|[][]")
"""A name with its brackets; or a single bracket without a partner, for which the group is empty."""
_BRACKET = re.compile(r"([^][]*)\[([^][]*)\]")
_RANGE = re.compile(r"(?P<low>[0-9]{1,18})(?:-(?P<high>[0-9]{1,18}))?")


def expand_hostlist(text: str) -> list[str]:
    """Return the names in a host list, in the order of `scontrol show hostnames`; repeated names stay repeated.

    A suffix after the last bracket (`n[1-2]-ib`) is allowed, as in newer versions of Slurm; 22.05 refuses it.
    """
    if "[" not in text and "]" not in text:
        return text.replace(",", " ").split()
    hosts: list[str] = []
    for name in _NAME.findall(text):
        if not name:
            raise _list_error(text, "a bracket has no partner")
        hosts += _expand(name, MAX_HOSTS - len(hosts), text) if "[" in name else [name]
    return hosts


def compress_hostlist(names: Iterable[str]) -> str:
    """Return a host list of these names, in any order. One argument of a command has at most 128 KiB (execve(2))."""
    alike: dict[tuple[str, int], list[int]] = defaultdict(list)
    for name in {*names}:
        stem = name.rstrip("0123456789")
        alike[stem, len(name) - len(stem)].append(int(name[len(stem) :] or 0))
    return ",".join(
        f"{stem}[{ranges_text(numbers, width)}]"
        if len(numbers) > 1
        else f"{stem}{numbers[0]:0{width}}"
        if width
        else stem
        for (stem, width), numbers in alike.items()
    )


def ranges_text(numbers: Iterable[int], width: int = 0) -> str:
    """Return `0-3,7` for 0, 1, 2, 3, 7, as sbatch takes them; with a width, `00-03,07`."""
    parts: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1] = (parts[-1][0], number)
        else:
            parts.append((number, number))
    return ",".join(
        f"{first:0{width}}" if first == last else f"{first:0{width}}-{last:0{width}}" for first, last in parts
    )


def _expand(name: str, most: int, text: str) -> list[str]:
    """Expand one name. The numbers of the last bracket change fastest, then those of the first, the second, ...: Slurm's order."""
    suffix = name[name.rindex("]") + 1 :]
    *slower, (before, ranges) = _BRACKET.findall(name)
    last = _expand_range(before, ranges, suffix, most, text)
    stems = [""]
    for prefix, slower_ranges in slower:
        endings = _expand_range(prefix, slower_ranges, "", most // (len(stems) * len(last)), text)
        stems = [stem + ending for ending in endings for stem in stems]
    return [stem + ending for stem in stems for ending in last] if slower else last


def _expand_range(before: str, ranges: str, after: str, most: int, text: str) -> list[str]:
    """Put each number of `1-3,05` between `before` and `after`; numbers keep their leading zeros."""
    names: list[str] = []
    head, tail = f"{before.replace('%', '%%')}%0", f"d{after.replace('%', '%%')}"
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part)
        if not found:
            raise _list_error(text, f"{part!r} is neither a number nor a range")
        low, high = found["low"], found["high"] or found["low"]
        first, last = int(low), int(high)
        if not 0 <= last - first < MAX_RANGE:
            raise _list_error(text, f"{part!r} runs backwards or has more than {MAX_RANGE} hosts")
        if len(names) + last - first >= most:
            raise _list_error(text, f"it stands for more than {MAX_HOSTS} hosts")
        names += map(f"{head}{len(low)}{tail}".__mod__, range(first, last + 1))
    return names


def _list_error(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not a Slurm host list: {why}. Correct it in `slurm.nodelist` or `slurm.exclude`; `scontrol show hostnames` expands a valid one."
    )
