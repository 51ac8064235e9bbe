"""From Slurm's compressed host lists to the names in them, without a call of `scontrol`."""

from __future__ import annotations

import re

from ddp_hpc.errors import ConfigError

MAX_RANGE = 65536
"""As many hosts as Slurm takes in one range."""

_NAME = re.compile(r"((?:[^][,\s]+|\[[^][\s]*\])+)|[][]")
"""A name with its brackets, or a bracket without its fellow, which leaves the group empty."""
_BRACKET = re.compile(r"([^][]*)\[([^][]*)\]")


def expand_hostlist(text: str) -> list[str]:
    """Return the names in a host list, in the order of `scontrol show hostnames`, repeated ones repeated.

    A suffix behind the last bracket (`n[1-2]-ib`) is taken, as newer versions of Slurm do; 22.05 refuses it.
    """
    if "[" not in text and "]" not in text:
        return text.replace(",", " ").split()
    hosts: list[str] = []
    for name in _NAME.findall(text):
        if not name:
            raise _refused(text, "a bracket is without its fellow")
        if "[" in name:
            hosts += _expand(name, text)
        else:
            hosts.append(name)
    return hosts


def _expand(name: str, text: str) -> list[str]:
    """Expand one name. The last bracket turns fastest; of those before it the first: that is Slurm's order."""
    suffix = name[name.rindex("]") + 1 :]
    *slower, (before, ranges) = _BRACKET.findall(name)
    last = _numbered(before, ranges, suffix, text)
    stems = [""]
    for prefix, slower_ranges in slower:
        endings = _numbered(prefix, slower_ranges, "", text)
        stems = [stem + ending for ending in endings for stem in stems]
    return [stem + ending for stem in stems for ending in last] if slower else last


def _numbered(before: str, ranges: str, after: str, text: str) -> list[str]:
    """Set each number of `1-3,05` between `before` and `after`; numbers keep their leading zeros."""
    if not ranges.isascii():
        raise _refused(text, f"{ranges!r} are not all numbers")
    names: list[str] = []
    head, tail = f"{before.replace('%', '%%')}%0", f"d{after.replace('%', '%%')}"
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not (low.isdigit() and (high.isdigit() or not dash)):
            raise _refused(text, f"{part!r} is neither a number nor a range")
        if not dash:
            names.append(before + low + after)
            continue
        first, last = int(low), int(high)
        if not 0 <= last - first < MAX_RANGE:
            raise _refused(text, f"{part!r} runs backwards, or over more than {MAX_RANGE} hosts")
        names += map(f"{head}{len(low)}{tail}".__mod__, range(first, last + 1))
    return names


def _refused(text: str, why: str) -> ConfigError:
    return ConfigError(f"{text!r} is no host list that Slurm writes: {why}. See `scontrol show hostnames`.")
