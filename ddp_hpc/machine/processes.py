"""The CPU time of a process and of all that it has started, read seldom and cheaply."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field

import psutil

SCAN_SHARE = 0.0002
"""To find new processes takes at most this share of a CPU: on a node with many processes, they are searched for less often."""
_STEP_PARENT = "slurmstepd"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class ProcessTree:
    """All processes below one, and that one; but not this one."""

    root: int
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    """CPU seconds by process (its id, and when it began) at the last look: its own, and those of children that it has waited for."""
    _known: list[int] = field(default_factory=list)
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
        used, seen, boot_s = 0.0, {}, time.clock_gettime(time.CLOCK_BOOTTIME)
        for pid in self._known:
            found = _stat(pid)
            if found is None:
                continue
            began, seconds = found
            seen[pid, began] = seconds
            if (pid, began) in self._seconds:
                used += seconds - self._seconds[pid, began]
            else:
                used += seconds * min(1.0, (now - before) / max(boot_s - began / _TICKS, 1e-3))
        # What a process that has ended had used stands in its parent's count now, once more.
        used -= sum(
            seconds for (pid, _), seconds in self._seconds.items() if pid not in self._known or _stat(pid) is None
        )
        self._known = [pid for pid, _ in seen]
        self._seconds = seen
        return max(0.0, used) if seen else None

    @property
    def cpus(self) -> frozenset[int]:
        """The CPUs that these processes may use, all together, when they were last searched for."""
        return frozenset(self._cpus)

    def _scan(self) -> None:
        begin = time.thread_time()
        try:
            top = psutil.Process(self.root)
            found = [self.root, *(one.pid for one in top.children(recursive=True))]
        except psutil.Error:
            found = []
        self._known = [pid for pid in found if pid != os.getpid()]
        self._cpus = set()
        for pid in self._known:
            try:
                self._cpus |= os.sched_getaffinity(pid)
            except OSError:  # it has ended, or is another user's
                continue
        self._scanned_at = time.monotonic()
        self._pause_s = (time.thread_time() - begin) / SCAN_SHARE


def _stat(pid: int) -> tuple[int, float] | None:
    """Return when a process began, in ticks since the boot, and its CPU seconds; None if it has ended or is not shown."""
    # Read here and not by psutil, which takes three times as long for the one thing that is read of each process at each look.
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123  cheaper than Path
            fields = file.read(1024).rpartition(b")")[2].split()
        # utime, stime, cutime, cstime; starttime (proc_pid_stat(5), https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html)
        return int(fields[19]), sum(map(int, fields[11:15])) / _TICKS
    except (OSError, ValueError, IndexError):
        return None


def step_parent() -> int | None:
    """Return the process of Slurm that has started all tasks of this node's step; None where it is not to be seen."""
    try:
        for process in psutil.Process().parents():
            if process.name() == _STEP_PARENT:
                return process.pid
    except psutil.Error:
        return None
    return None
