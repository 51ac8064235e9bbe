"""Whether a script is alive: it writes to its log, or it and its children use CPU time.

A script that prints nothing for an hour may compute, and one that waits in a collective for a rank that is gone uses next to
no CPU. With NCCL, a waiting process may use a whole CPU: such a hang ends by NCCL's own timeout (`init_process_group(timeout=)`).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LEAST_CPU_SHARE = 0.01
"""Of one CPU. Threads that only look whether there is something to do, as loggers and watchdogs have, use less."""
LEAST_CPU_S = 0.03
"""The kernel counts in steps of 0.01 s, so one step says nothing about a short time."""
_PROBE_THREAD_NAME = "pt_workerserver"
"""The name of the threads that answer our questions: they use CPU time also where the script does nothing."""


@dataclass(kw_only=True)
class ScriptActivity:
    """What the last check of a script has found."""

    pid: int
    log: Path
    interval_s: float
    """How often to look; a share of CPU time says little about a short time."""
    _cpu_s: float = 0.0
    _log_size: int = 0
    _looked_at: float = field(default_factory=time.monotonic)
    _alive_at: float = field(default_factory=time.monotonic)

    def is_due(self) -> bool:
        """Tell whether it is time to look."""
        return time.monotonic() - self._looked_at >= self.interval_s

    @property
    def silent_s(self) -> float:
        """For how long it has done nothing, at the last look."""
        return self._looked_at - self._alive_at

    def was_active(self) -> bool:
        """Tell whether the script has done something since the last look."""
        now, cpu_s, log_size = time.monotonic(), cpu_seconds(self.pid), self._log_size
        with suppress(OSError):
            log_size = self.log.stat().st_size
        # Children that have ended, and were not waited for by the script, are missing in the sum, which then is smaller.
        is_busy = abs(cpu_s - self._cpu_s) >= max(LEAST_CPU_SHARE * (now - self._looked_at), LEAST_CPU_S)
        has_written = log_size != self._log_size
        self._cpu_s, self._log_size, self._looked_at = cpu_s, log_size, now
        if is_busy or has_written:
            self._alive_at = now
        return is_busy or has_written


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, of its children that have ended, and of those that run, in seconds."""
    total = 0.0
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
    return total - _probe_threads_cpu_s(pid)


def _probe_threads_cpu_s(pid: int) -> float:
    """Return the CPU time of the threads of a process that answer questions about it; 0 where the kernel does not say it."""
    ticks, tasks = 0, list[Path]()
    with suppress(OSError):  # it has ended
        tasks = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    for task in tasks:
        with suppress(OSError, ValueError, IndexError):
            name, _, fields = task.read_text(encoding="utf-8", errors="replace").partition("(")[2].rpartition(")")
            if name == _PROBE_THREAD_NAME:
                ticks += sum(map(int, fields.split()[11:13]))  # utime, stime (proc_pid_stat(5))
    return ticks / os.sysconf("SC_CLK_TCK")
