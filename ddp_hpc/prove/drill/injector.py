"""Injects a fault on a node: finds one process of a run there, and kills, freezes or slows it.

    python -m ddp_hpc.prove.drill.injector RUN_DIR kill worker --mark MARK

It runs as an overlapping step of the job that trains, with the permissions of the job's user. It prints what it did in the
format of `slurm.framing`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_hpc.base import processes
from ddp_hpc.cluster.slurm.allocation import node_name
from ddp_hpc.cluster.slurm.framing import framed

INJECTOR_MODULE = "ddp_hpc.prove.drill.injector"
AGENT_MODULES = ("ddp_hpc.job.node.agent", "ddp_hpc.train.torchrun")
WORKER_MODULES = ("ddp_hpc.job.node.task", "ddp_hpc.job.node.spawned_worker")
BURSTS, BURST_S = 8, 0.3
"""How often a slow worker is suspended, and for how long each time."""


@dataclass(frozen=True)
class NodeProcess:
    """A process of this node, as the kernel lists it."""

    pid: int
    parent: int
    argv: Sequence[str]

    @property
    def module(self) -> str:
        """The module that Python was started with (`-m`); `srun` for srun; empty for anything else."""
        if Path(self.argv[0]).name == "srun":
            return "srun"
        words = list(self.argv)
        return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def pids_by_kind(processes: Sequence[NodeProcess], run_path: str) -> Mapping[str, list[int]]:
    """Return the process ids of the run's agents, workers and sruns, the lowest first."""
    ours = {one.pid: one for one in processes if run_path in one.argv and INJECTOR_MODULE not in one.argv}
    modules = {pid: one.module for pid, one in ours.items()}

    # A forked child keeps its parent's command line. So a DataLoader process looks like the worker that forked it, and
    # srun's helper process like srun: only a process whose parent runs another module counts.
    def first_of(*names: str) -> list[NodeProcess]:
        found = [one for one in ours.values() if modules[one.pid] in names]
        return [one for one in found if modules.get(one.parent) != modules[one.pid]]

    agents = first_of(*AGENT_MODULES)
    # The one exception: our agent forks its workers, so they look like the agent, and are its direct children.
    forked = [
        one for one in ours.values() if modules[one.pid] == AGENT_MODULES[0] and one.parent in {a.pid for a in agents}
    ]
    by_kind = {"agent": agents, "worker": [*forked, *first_of(*WORKER_MODULES)], "srun": first_of("srun")}
    return {kind: sorted(one.pid for one in ones) for kind, ones in by_kind.items()}


def list_processes(found: Iterable[psutil.Process] | None = None) -> list[NodeProcess]:
    """Return those of the processes that are not gone; all of this node, if none are given."""
    listed = []
    for process in psutil.process_iter() if found is None else found:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            listed.append(NodeProcess(process.pid, process.ppid(), process.cmdline()))
    return listed


def stutter(pid: int) -> None:
    """Suspend the process for a moment, several times."""
    for _ in range(BURSTS):
        processes.send_signal([pid], signal.SIGSTOP)
        time.sleep(BURST_S)
        processes.send_signal([pid], signal.SIGCONT)
        time.sleep(BURST_S)


ACTIONS: Mapping[str, Callable[[int], None]] = {
    "kill": lambda pid: processes.kill([pid]),  # as the kernel does when memory runs out
    "freeze": lambda pid: processes.send_signal([pid], signal.SIGSTOP),
    "stutter": stutter,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Apply the action to the newest process of the kind; return 1 if there is none."""
    parser = argparse.ArgumentParser(prog=INJECTOR_MODULE, description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("kind", choices=("worker", "agent", "srun"))
    parser.add_argument("--mark", required=True, help="text that marks the lines of the answer")
    arguments = parser.parse_args(argv)
    found = pids_by_kind(list_processes(), str(arguments.run))
    if not found[arguments.kind]:
        sys.stderr.write(
            f"found no {arguments.kind} process of the run {arguments.run} on {node_name(os.environ)}; start the drill again\n"
        )
        return 1
    pid, at = found[arguments.kind][-1], time.time()
    ACTIONS[arguments.action](pid)
    sys.stdout.write(framed({"pid": pid, "at": at}, node=node_name(os.environ), mark=arguments.mark))
    return 0


if __name__ == "__main__":
    sys.exit(main())
