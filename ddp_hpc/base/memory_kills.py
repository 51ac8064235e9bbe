"""Counts the processes that the kernel has killed in a process's cgroup because its memory ran out."""

from __future__ import annotations

import re
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBER = re.compile(r"^(?:\d+:(?:\w+,)*(?P<v1>memory)(?:,\w+)*|0:):(?P<path>/.*)$", re.MULTILINE)
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def num_memory_kills(root: Path = _ROOT, member: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return how often the kernel did so; None where it keeps no count.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), and memory.oom_control of version 1.
    """
    try:
        found = list(_MEMBER.finditer(member.read_text(encoding="utf-8")))
        of_v1 = next((one for one in found if one["v1"]), None)
        chosen = of_v1 or found[0]
        folder = (root / "memory" if of_v1 else root) / chosen["path"].lstrip("/")
        text = (folder / ("memory.oom_control" if of_v1 else "memory.events")).read_text(encoding="utf-8")
        return int(_COUNT.findall(text)[0])
    except (OSError, IndexError, UnicodeDecodeError):
        return None


def has_killed(before: int | None) -> bool:
    """Tell whether the kernel has done so since there were `before`; False where that is not known."""
    now = num_memory_kills()
    return before is not None and now is not None and now > before
