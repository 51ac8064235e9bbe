"""The CPU time of a process and of all that it has started, read seldom and cheaply."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

SCAN_SHARE = 0.0002
"""To find new processes takes at most this share of a CPU: on a node with many processes, they are searched for less often."""
_STEP_PARENT = b"slurmstepd"
_TICKS = os.sysconf("SC_CLK_TCK")


class _Stat(NamedTuple):
    """What the kernel counts of one process."""

    parent: int
    began: int
    """Ticks since the boot: a number of a process is used again, and not with the same beginning."""
    own_s: float
    waited_s: float
    """CPU seconds of the children that it has waited for, and of theirs."""


@dataclass
class ProcessTree:
    """All processes below one, and that one; but not this one. A process stays, also when its parent ends before it."""

    root: int
    _members: dict[int, int] = field(default_factory=dict)
    """The processes that are sampled, and when they began."""
    _last: dict[int, _Stat] = field(default_factory=dict)
    """What was read of them at the last look."""
    _cpus: set[int] = field(default_factory=set)
    _scanned_at: float = -math.inf
    _pause_s: float = 0.0
    _looked_at: float = field(default_factory=time.monotonic)

    def used_s(self) -> float | None:
        """Return the CPU seconds used since the last call; None where no process can be seen.

        What a process has used before it is found counts by the share of its life since the last call.
        """
        now, before = time.monotonic(), self._looked_at
        self._looked_at = now
        if now - self._scanned_at >= self._pause_s:
            self._scan()
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        found = {pid: one for pid in self._members if (one := _stat(pid)) and one.began == self._members[pid]}
        counted, used = _counted(self._last, found), 0.0
        for pid, one in found.items():
            last = self._last.get(pid)
            if last is None or last.began != one.began:
                used += (one.own_s + one.waited_s) * min(1.0, (now - before) / max(boot_s - one.began / _TICKS, 1e-3))
            else:
                used += one.own_s - last.own_s + max(0.0, one.waited_s - last.waited_s - counted.get(pid, 0.0))
        self._last, self._members = found, {pid: one.began for pid, one in found.items()}
        return max(0.0, used) if found else None

    @property
    def cpus(self) -> frozenset[int]:
        """The CPUs that these processes may use, all together, when they were last searched for.

        The first one does not count where it has started others: an agent and Slurm's step process may use more than the workers.
        """
        return frozenset(self._cpus)

    def _scan(self) -> None:
        begin = time.thread_time()
        stats = {int(name): one for name in os.listdir("/proc") if name.isdecimal() and (one := _stat(int(name)))}  # noqa: PTH208  cheaper than Path
        children: dict[int, list[int]] = {}
        for pid, one in stats.items():
            children.setdefault(one.parent, []).append(pid)
        new = [self.root, *(pid for pid, began in self._members.items() if pid in stats and stats[pid].began == began)]
        below: set[int] = set()
        while new:
            pid = new.pop()
            if pid in stats and pid not in below and pid != os.getpid():
                below.add(pid)
                new += children.get(pid, [])
        self._members = {pid: stats[pid].began for pid in below}
        self._cpus = set()
        for pid in below - {self.root} or below:
            with suppress(OSError):  # it has ended, or is another user's
                self._cpus |= os.sched_getaffinity(pid)
        self._scanned_at = time.monotonic()
        self._pause_s = (time.thread_time() - begin) / SCAN_SHARE


def _counted(last: Mapping[int, _Stat], found: Mapping[int, _Stat]) -> dict[int, float]:
    """Return, by living process, what those that have ended below it had used: that was counted, and stands in its count of children now."""
    ended = {pid: one for pid, one in last.items() if pid not in found or found[pid].began != one.began}
    counted: dict[int, float] = {}
    for one in ended.values():
        heir = one.parent
        while heir in ended:
            heir = ended[heir].parent
        counted[heir] = counted.get(heir, 0.0) + one.own_s + one.waited_s
    return counted


def _stat(pid: int) -> _Stat | None:
    """Return what the kernel counts of a process; None if it has ended or is not shown."""
    # Read here and not by psutil, which takes three times as long for the few things that are read of each process at each look.
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  cheaper than Path
            fields = file.read(1024).rpartition(b")")[2].split()
        # ppid; starttime; utime, stime; cutime, cstime (proc_pid_stat(5), https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html)
        own, waited = (sum(map(int, fields[first : first + 2])) / _TICKS for first in (11, 13))
        return _Stat(int(fields[1]), int(fields[19]), own, waited)
    except (OSError, ValueError, IndexError):
        return None


def step_parent() -> int | None:
    """Return the process of Slurm that has started all tasks of this node's step; None where it is not to be seen."""
    pid = os.getpid()
    while (one := _stat(pid)) is not None and one.parent != 0:
        pid = one.parent
        with suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_bytes().strip() == _STEP_PARENT:
                return pid
    return None
