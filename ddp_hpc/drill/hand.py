"""The hand that makes a fault on a node: finds one process of a run there, and kills, freezes or slows it.

    python -m ddp_hpc.drill.hand RUN_DIR kill worker --mark MARK

Runs as a step of the job, beside those that train, so that it may do what the job's user may and nothing else. It prints
what it did in the lines of `slurm.answers`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddp_hpc import processes
from ddp_hpc.slurm.allocation import node_name
from ddp_hpc.slurm.answers import framed

HAND = "ddp_hpc.drill.hand"
AGENTS = ("ddp_hpc.job.agent", "torch.distributed.run")
TASKS = ("ddp_hpc.job.task", "ddp_hpc.job.spawned")
BURSTS, BURST_S = 8, 0.3
"""How often, and for how long at a time, a slow worker stands still."""


@dataclass(frozen=True)
class Seen:
    """A process as the kernel lists it."""

    pid: int
    parent: int
    argv: Sequence[str]

    @property
    def module(self) -> str:
        """What Python was started with (`-m`); srun by its own name; else nothing."""
        if Path(self.argv[0]).name == "srun":
            return "srun"
        words = list(self.argv)
        return words[words.index("-m") + 1] if "-m" in words[:-1] else ""


def sort_out(seen: Sequence[Seen], run_path: str) -> Mapping[str, list[int]]:
    """Return the run's processes by what they are: the oldest first.

    A worker is what an agent has forked, or srun or torchrun have started; what it forks itself, loader processes, looks
    like it and is none. srun forks itself too.
    """
    ours = {one.pid: one for one in seen if run_path in one.argv and HAND not in one.argv}
    modules = {pid: one.module for pid, one in ours.items()}

    def is_first(one: Seen) -> bool:
        return modules.get(one.parent) != modules[one.pid]

    agents = [one for one in ours.values() if modules[one.pid] in AGENTS and is_first(one)]
    tasks = [one for one in ours.values() if modules[one.pid] in TASKS and is_first(one)]
    forked = [one for one in ours.values() if modules[one.pid] == AGENTS[0] and one.parent in {a.pid for a in agents}]
    starters = [one for one in ours.values() if modules[one.pid] == "srun" and is_first(one)]
    found = {"agent": agents, "worker": [*forked, *tasks], "srun": starters}
    return {kind: sorted(one.pid for one in ones) for kind, ones in found.items()}


def look() -> list[Seen]:
    """Return the processes of this node."""
    found = []
    for process in psutil.process_iter():
        try:
            found.append(Seen(process.pid, process.ppid(), process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def kill(pid: int) -> None:
    """End it as the kernel does when memory is short."""
    processes.send([pid], signal.SIGKILL)


def freeze(pid: int) -> None:
    """Let it stand still for ever."""
    processes.send([pid], signal.SIGSTOP)


def stutter(pid: int) -> None:
    """Let it stand still now and then, and go on."""
    for _ in range(BURSTS):
        processes.send([pid], signal.SIGSTOP)
        time.sleep(BURST_S)
        processes.send([pid], signal.SIGCONT)
        time.sleep(BURST_S)


DEEDS: Mapping[str, Callable[[int], None]] = {"kill": kill, "freeze": freeze, "stutter": stutter}


def main(argv: Sequence[str] | None = None) -> int:
    """Do it to the newest of the kind; return 1 where there is none."""
    parser = argparse.ArgumentParser(prog=HAND, description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("deed", choices=DEEDS)
    parser.add_argument("kind", choices=("worker", "agent", "srun"))
    parser.add_argument("--mark", required=True, help="of the answer's lines")
    arguments = parser.parse_args(argv)
    found = sort_out(look(), str(arguments.run))
    if not found[arguments.kind]:
        sys.stderr.write(f"there is no {arguments.kind} of {arguments.run} here\n")
        return 1
    pid, at = found[arguments.kind][-1], time.time()
    DEEDS[arguments.deed](pid)
    sys.stdout.write(framed({"pid": pid, "at": at}, node=node_name(os.environ), mark=arguments.mark))
    return 0


if __name__ == "__main__":
    sys.exit(main())
