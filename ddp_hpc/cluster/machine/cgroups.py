"""How much memory and how many CPUs the cgroups of this process allow, and what the kernel killed in them, of both versions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ddp_hpc.base.processes import kernel_text

_CGROUP_PATTERN = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)
_STAT_PATTERN = re.compile(r"^(\w+) (\d+)$", re.MULTILINE)
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("file", "slab_reclaimable"), "shmem"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache",), "total_shmem"),
)
"""Of each version: the limit, what is used, and of that what the kernel frees when memory runs short, without shared memory (/dev/shm)."""
_NO_LIMIT = 2**60
"""Version 1 writes the largest number of pages, in bytes, where there is no limit."""


def own_cgroups(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the folders of this process's cgroups and of all above them, as far as they can be seen."""
    try:
        members = _CGROUP_PATTERN.findall((proc / "self/cgroup").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):  # a kernel without cgroups
        return []
    tops = {"": root, "memory": root / "memory", "cpu": root / "cpu"}  # version 2 has no names
    folders: list[Path] = []
    for top, path in ((tops[name], path) for names, path in members for name in names.split(",") if name in tops):
        own = top / path.lstrip("/")
        # A container may show its own cgroup as the root, while the path is the host's.
        is_seen = ".." not in own.parts and own.is_dir()
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(top)] if is_seen else [top]
    return folders


def used_and_limit(cgroups: Sequence[Path]) -> tuple[int, int] | None:
    """Return the bytes that are used and the limit, of the cgroup with the lowest limit; None where none has one."""
    found: list[tuple[int, int]] = []
    for folder, (limit_file, used_file, freed, shared) in product(cgroups, _MEMORY_FILES):
        limit, used = (kernel_text(folder / name).strip() for name in (limit_file, used_file))
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT:
            stat = _read_stat(folder / "memory.stat")
            free = sum(stat.get(name, 0) for name in freed) - stat.get(shared, 0)
            found.append((max(0, int(used) - free), int(limit)))
    return min(found, key=lambda one: one[1], default=None)


@dataclass(frozen=True)
class MemoryKills:
    """What the kernel has counted: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events), memory.oom_control of version 1."""

    num: int
    """Processes that it has killed here because memory ran out."""
    num_at_limits: int
    """How often a limit that holds here was reached."""
    sees_limits: bool
    """Whether it shows all these limits: not in version 1, and not in a container."""


def memory_kills(cgroups: Sequence[Path] | None = None) -> MemoryKills | None:
    """Return what the kernel has counted in this process's cgroups; None where it keeps no count."""
    folders = own_cgroups() if cgroups is None else cgroups
    files = (folder / name for folder in folders for name in ("memory.oom_control", "memory.events"))
    num = next((rows["oom_kill"] for file in files if "oom_kill" in (rows := _read_stat(file))), None)
    at_limits = [_read_stat(folder / "memory.events.local").get("oom") for folder in folders]
    # The root alone has no such file; a cgroup without the controller has no limit either.
    sees_limits = any(one is not None for one in at_limits) and at_limits[-1] is None
    return None if num is None else MemoryKills(num, sum(filter(None, at_limits)), sees_limits)


def whose_memory_ran_out(before: MemoryKills | None, cgroups: Sequence[Path] | None = None) -> str:
    """Return whose memory has run out since then, where the kernel killed a process for it; empty where it did not."""
    now = memory_kills(cgroups)
    if before is None or now is None or now.num <= before.num:
        return ""
    if now.num_at_limits > before.num_at_limits:
        return "of the job or of the container, up to its limit,"
    return "of the machine" if now.sees_limits else "of its cgroup or of the machine (it is not known which)"


def _read_stat(path: Path) -> Mapping[str, int]:
    return {name: int(value) for name, value in _STAT_PATTERN.findall(kernel_text(path))}


def quota_of(cgroups: Sequence[Path]) -> float | None:
    """Return the lowest quota of CPUs; None where there is none."""
    files = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))  # of version 2 and of version 1
    texts = [[kernel_text(folder / name) for name in names] for folder, names in product(cgroups, files)]
    pairs = [" ".join(text).split() for text in texts]
    numbers = [[*map(int, pair)] for pair in pairs if len(pair) == 2 and all(map(str.isdecimal, pair))]
    return min((quota / period for quota, period in numbers if quota and period), default=None)
