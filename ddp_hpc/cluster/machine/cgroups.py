"""How much memory and how many CPUs the cgroups of this process allow, of both versions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

_MEMBER = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)
_ROW = re.compile(r"^(\w+) (\d+)$", re.MULTILINE)
_MEMORY = (
    ("memory.max", "memory.current", ("file", "slab_reclaimable"), "shmem"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_cache",), "total_shmem"),
)
"""Of each version: the limit, what is used, and of that what the kernel frees when memory runs short, without shared memory (/dev/shm)."""
_NO_LIMIT = 2**60
"""Version 1 writes the largest number of pages, in bytes, where there is no limit."""


def own_cgroups(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Return the folders of this process's cgroups and of all above them, as far as they can be seen."""
    try:
        members = _MEMBER.findall((proc / "self/cgroup").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):  # a kernel without cgroups
        return []
    tops = {"": root, "memory": root / "memory", "cpu": root / "cpu"}  # version 2 has no names
    return [
        folder
        for names, path in members
        for name in names.split(",")
        if name in tops
        for folder in _chain(tops[name], path)
    ]


def _chain(top: Path, path: str) -> list[Path]:
    own = top / path.lstrip("/")
    # A container may show its own cgroup as the root, while the path is the host's.
    if ".." in own.parts or not own.is_dir():
        return [top]
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]


def memory_of(cgroups: Sequence[Path]) -> tuple[int, int] | None:
    """Return the bytes that are used and the limit, of the cgroup with the lowest limit; None where none has one."""
    found = [one for folder in cgroups if (one := _memory(folder)) is not None]
    return min(found, key=lambda one: one[1], default=None)


def _memory(folder: Path) -> tuple[int, int] | None:
    for limit_file, used_file, freed, shared in _MEMORY:
        limit, used = (_read(folder / name).strip() for name in (limit_file, used_file))
        if limit.isdecimal() and used.isdecimal() and int(limit) < _NO_LIMIT:
            stat = {name: int(value) for name, value in _ROW.findall(_read(folder / "memory.stat"))}
            free = sum(stat.get(name, 0) for name in freed) - stat.get(shared, 0)
            return max(0, int(used) - free), int(limit)
    return None


def quota_of(cgroups: Sequence[Path]) -> float | None:
    """Return the lowest quota of CPUs; None where there is none."""
    return min((quota for folder in cgroups if (quota := _quota(folder)) is not None), default=None)


def _quota(folder: Path) -> float | None:
    of_version_1 = " ".join(_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    for text in (_read(folder / "cpu.max"), of_version_1):
        words = text.split()
        if len(words) == 2 and all(word.isdecimal() and int(word) for word in words):
            return int(words[0]) / int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the file is of another version, or this container does not show it
        return ""
