"""The CPU time of a process and of all that it has started, read seldom and cheaply."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import psutil

SCAN_SHARE = 0.0005
"""To find new processes takes at most this share of a CPU: on a node with many processes, they are searched for less often."""
_STEP_PARENT = "slurmstepd"


@dataclass
class ProcessTree:
    """All processes below one, but for this one."""

    root: int
    _known: dict[int, psutil.Process] = field(default_factory=dict)
    _seconds: dict[int, float] = field(default_factory=dict)
    """CPU seconds by process at the last look: its own, and those of children that it has waited for."""
    _cpus: set[int] = field(default_factory=set)
    _scanned_at: float = 0.0
    _pause_s: float = 0.0
    _looked_at: float = field(default_factory=time.time)

    def used_s(self) -> float | None:
        """Return the CPU seconds used since the last call; None where no process can be seen.

        What a process has used before it is found counts by the share of its life since the last call.
        """
        now, before, self._looked_at = time.time(), self._looked_at, time.time()
        if time.monotonic() - self._scanned_at >= self._pause_s:
            self._scan()
        used, seen = 0.0, {}
        for pid, process in self._known.items():
            try:
                seconds = sum(process.cpu_times()[:4])
                if pid in self._seconds:
                    used += seconds - self._seconds[pid]
                else:
                    used += seconds * min(1.0, (now - before) / max(now - process.create_time(), 1e-3))
            except psutil.Error:
                continue
            seen[pid] = seconds
        # What a process that has ended had used stands in its parent's count now, once more.
        used -= sum(seconds for pid, seconds in self._seconds.items() if pid not in seen and not psutil.pid_exists(pid))
        self._known = {pid: process for pid, process in self._known.items() if pid in seen}
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
            found = [top, *top.children(recursive=True)]
        except psutil.Error:
            found = []
        self._known = {one.pid: self._known.get(one.pid, one) for one in found if one.pid != os.getpid()}
        self._cpus = set()
        for pid in self._known:
            try:
                self._cpus |= os.sched_getaffinity(pid)
            except OSError:  # it has ended, or is another user's
                continue
        self._scanned_at = time.monotonic()
        self._pause_s = (time.thread_time() - begin) / SCAN_SHARE


def step_parent() -> int | None:
    """Return the process of Slurm that has started all tasks of this node's step; None where it is not to be seen."""
    try:
        for process in psutil.Process().parents():
            if process.name() == _STEP_PARENT:
                return process.pid
    except psutil.Error:
        return None
    return None
