"""The processes of a run: found, asked to stop, killed, and asked whether they compute."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from ddp_hpc.base import processes
from ddp_hpc.job.script.liveness import LEAST_CPU_SHARE, cpu_seconds
from ddp_hpc.prove.certify.records import SignalAction
from ddp_hpc.prove.drill.injector import NodeProcess, list_processes, pids_by_kind
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir

MARK_VARIABLE = "_DDP_HPC_CERTIFIED_RUN"
"""A variable of all processes of a run that is certified; its value is the run's directory."""
VANISH_S = 10.0
"""How long killed processes get to vanish."""
_SUPERVISOR_S = 3.0
"""How long the supervisor of an attempt that has ended may take to exit."""
_TICK_S = 0.01


@dataclass
class LiveProcesses:
    """The processes of one attempt."""

    run: RunDir
    workers: list[int] = field(default_factory=list)
    """One for each rank, the parent of its script."""
    scripts: list[int] = field(default_factory=list)
    """The user's script, once for each rank."""
    others: list[int] = field(default_factory=list)
    """All others, down from the supervisor."""
    scripts_since: float | None = None
    """When the scripts were first seen, by the monotonic clock."""
    _cpu_at: float = field(default_factory=time.monotonic)
    _cpu_s: float = 0.0

    def find(self) -> None:
        """Look for the processes of the newest attempt; those of an ended one stay as they were found."""
        newest = Ledger.read(self.run).newest
        if newest is None or newest.ending is not None:
            return
        listed: list[NodeProcess] = []
        with suppress(psutil.Error):
            listed = list_processes(psutil.Process(newest.pid).children(recursive=True))
        self.workers = pids_by_kind([one for one in listed if one.argv], str(self.run.path))["worker"]
        children = [[one.pid for one in listed if one.parent == worker] for worker in self.workers]
        self.scripts = [min(pids) for pids in children if pids]
        if self.scripts and self.scripts_since is None:
            self.scripts_since = time.monotonic()
        self.others = [one.pid for one in listed if one.pid not in self.scripts and one.pid not in self.workers]

    def have_computed(self) -> bool:
        """Tell whether the scripts have used the CPU since the last look, of which there is one a second."""
        now = time.monotonic()
        if now - self._cpu_at <= 1.0:
            return False
        newest = Ledger.read(self.run).newest
        pids = self.scripts or ([] if newest is None else [newest.pid])
        used_s, before_s, span_s = sum(map(cpu_seconds, pids)), self._cpu_s, now - self._cpu_at
        self._cpu_at, self._cpu_s = now, used_s
        return abs(used_s - before_s) > 2 * LEAST_CPU_SHARE * max(1, len(pids)) * span_s

    def ask_to_stop(self, gap_s: float) -> None:
        """Ask the ranks to stop, the last one first and rank zero last, as signals arrive at different moments."""
        for worker in reversed(self.workers):
            processes.request_stop([worker])
            time.sleep(gap_s)

    def terminate_everything(self) -> None:
        """Send SIGTERM to every process of the workers, the processes that they have started included."""
        below = []
        for script in self.scripts:
            with suppress(psutil.Error):
                below += [one.pid for one in psutil.Process(script).children(recursive=True)]
        processes.terminate([*below, *self.scripts, *self.workers])

    def action_of(self, signal_name: str) -> SignalAction:
        """Return what rank zero's script does with a signal (proc(5), SigIgn and SigCgt)."""
        script, number = self.scripts[0], processes.signal_number(signal_name)
        if processes.start_ticks(script) is None:
            return ""
        if processes.is_in_mask(script, number, "SigIgn"):
            return "ignored"
        return "caught" if processes.is_in_mask(script, number, "SigCgt") else "default"


def end_all_below(top: int) -> None:
    """Kill a process of ours and all below it, and wait until they have vanished."""
    below: list[int] = []
    with suppress(psutil.Error):  # what is started just now has our mark: `end_survivors` finds it
        below = [one.pid for one in psutil.Process(top).children(recursive=True)]
    processes.kill([top, *below])
    deadline = time.monotonic() + VANISH_S
    while any(processes.start_ticks(pid) is not None for pid in below) and time.monotonic() < deadline:
        time.sleep(_TICK_S)


def end_survivors(run: RunDir, command: str) -> list[str]:
    """Kill what a script has left behind, in whichever session, as Slurm does at a job's end; return the command lines."""
    with suppress(OSError):  # a file system without locks
        deadline = time.monotonic() + _SUPERVISOR_S
        while processes.is_locked(run.lock) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
    found = {}
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it is gone, or another user's
            if each.environ().get(MARK_VARIABLE) == str(run.path) and each.status() != psutil.STATUS_ZOMBIE:
                found[each.pid] = " ".join(each.cmdline())
    processes.kill(found)
    # Ours, and the script, may be exiting just now; a process that the script has forked shows its command line, too, and is
    # killed unnamed.
    return [one for one in dict.fromkeys(found.values()) if "ddp_hpc.job" not in one and not command.startswith(one)]
