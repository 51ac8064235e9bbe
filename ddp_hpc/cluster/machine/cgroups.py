"""What the cgroups of this process say of CPUs and memory: limits, use, time throttled, time waited. Versions 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMBER = re.compile(r"^\d+:([^:]*):(/.*)$", re.MULTILINE)
_STEP = re.compile(r"step_[^/]+")
_NO_LIMIT = 2**60
"""Version 1 writes the largest number of pages, in bytes, where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class CpuLimit:
    """What the cgroups allow and have refused."""

    quota: float | None = None
    """CPUs; None without a quota."""
    throttled_s: float | None = None
    """Seconds that threads were kept from running since the cgroup was made; None where it is not counted."""
    waited_s: float | None = None
    """Seconds in which some task waited for a CPU; None where the kernel does not count that."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of the cgroup with the lowest limit."""

    used: int
    """Bytes, without what the kernel frees when memory runs short: the page cache, and its notes of files; shared memory (/dev/shm) counts."""
    limit: int


class Cgroups:
    """The cgroups of this process."""

    def __init__(self, proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> None:
        members: dict[str, str] = {}
        try:
            for names, path in _MEMBER.findall((proc / "self/cgroup").read_text(encoding="utf-8")):
                members |= dict.fromkeys(names.split(","), path)
        except (OSError, UnicodeDecodeError):  # a kernel without cgroups
            return
        finally:
            unified = root / "unified" if (root / "unified").is_dir() else root
            self._v2 = _chain(unified, members.get("", "/"))
            self._v1 = {name: _chain(root / name, members[name]) for name in ("cpu", "memory") if name in members}

    def cpu(self) -> CpuLimit:
        """Return what the cgroups say of CPUs now; None stands for what they do not say."""
        quotas = [(quota, folder) for folder in self._v2 if (quota := _quota(folder)) is not None]
        quotas += [(quota, folder) for folder in self._v1.get("cpu", []) if (quota := _quota_v1(folder)) is not None]
        lowest = min(quotas, default=None)
        return CpuLimit(
            quota=lowest[0] if lowest else None,
            throttled_s=None if lowest is None else _throttled_s(lowest[1]),
            waited_s=_waited_s(_of_step(self._v2)),
        )

    def memory(self) -> MemoryUse | None:
        """Return the memory of the cgroup with the lowest limit; None where none has one."""
        found = [use for folder in self._v2 if (use := _memory(folder)) is not None]
        found += [use for folder in self._v1.get("memory", []) if (use := _memory_v1(folder)) is not None]
        return min(found, key=lambda use: use.limit, default=None)


def _chain(top: Path, path: str) -> list[Path]:
    """Return the folders from a cgroup up to the root of what can be seen.

    A container may show its own cgroup as the root, while the path is the host's.
    """
    own = top / path.lstrip("/")
    if ".." in own.parts or not own.is_dir():
        return [top]
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]


def _of_step(chain: list[Path]) -> Path | None:
    """Return the folder of the Slurm step, which holds all its tasks; else this process's own."""
    return next((folder for folder in chain if _STEP.fullmatch(folder.name)), next(iter(chain), None))


def _quota(folder: Path) -> float | None:
    words = _read(folder / "cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdecimal() and int(words[1]) else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = (_whole(_read(folder / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
    return quota / period if quota and period and quota > 0 else None


def _throttled_s(folder: Path) -> float | None:
    values = _table(folder / "cpu.stat")
    if "throttled_usec" in values:
        return values["throttled_usec"] / 1e6
    return values["throttled_time"] / 1e9 if "throttled_time" in values else None


def _waited_s(folder: Path | None) -> float | None:
    """Return the stall time by https://docs.kernel.org/accounting/psi.html, in seconds."""
    found = None if folder is None else re.search(r"^some .*total=(\d+)", _read(folder / "cpu.pressure"), re.MULTILINE)
    return int(found[1]) / 1e6 if found else None


def _memory(folder: Path) -> MemoryUse | None:
    limit, used = _whole(_read(folder / "memory.max")), _whole(_read(folder / "memory.current"))
    values = _table(folder / "memory.stat")
    if limit is None or used is None:
        return None
    freed = values.get("file", 0) - values.get("shmem", 0) + values.get("slab_reclaimable", 0)
    return MemoryUse(used=max(0, used - freed), limit=limit)


def _memory_v1(folder: Path) -> MemoryUse | None:
    limit, used = (_whole(_read(folder / f"memory.{name}_in_bytes")) for name in ("limit", "usage"))
    values = _table(folder / "memory.stat")
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    cache, shared = values.get("total_cache", 0), values.get("total_shmem", 0)
    return MemoryUse(used=max(0, used - cache + shared), limit=limit)


def _table(path: Path) -> dict[str, int]:
    return dict(_rows(_read(path)))


def _rows(text: str) -> Iterator[tuple[str, int]]:
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            yield name, int(value)


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if re.fullmatch(r"-?\d+", text, re.ASCII) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the file is of another version, or this container does not show it
        return ""
