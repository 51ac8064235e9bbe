"""Samples how busy this node is, beside the workers of one attempt, and writes a record a minute into the run directory.

    python -m ddp_hpc.cluster.machine.sampler RUN_DIR --attempt 0 --node-rank 1 --gpus 8 --parent 4711 --root 4711

It is started beside the workers (`job.node.start_sampler`), which are processes below the one that `--root` names. It ends when its standard
input is closed, after a last record, and is killed when the process that `--parent` names ends. A file system or a driver that does not
answer delays it alone.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import psutil

from ddp_hpc.base import processes
from ddp_hpc.cluster.machine.cgroups import own_cgroups, quota_of, used_and_limit
from ddp_hpc.cluster.machine.gpus import GIB, Gpu, GpuReader
from ddp_hpc.cluster.slurm.allocation import granted_cpus, node_name
from ddp_hpc.run.run_dir.machine_use import FULL_SHARE, MachineUse, append_use, merge_uses
from ddp_hpc.run.run_dir.paths import RunDir

SAMPLE_S = 10.0
"""The time between two looks."""
SAMPLES_PER_RECORD = 6
_PATIENCE_S = 1.0
"""How long a look waits for NVIDIA's driver."""


@dataclass(kw_only=True)
class Sampler:
    """Says what one node uses."""

    node_rank: int
    node: str
    gpus: GpuReader | None
    root: psutil.Process | None
    """The process below which the workers are; None where it is not to be seen."""
    granted: int | None
    """How many CPUs Slurm has granted the job on this node."""
    cgroups: Sequence[Path]
    _at: float = field(default_factory=time.monotonic)  # for lengths of time: the wall clock may be set, by hours
    _cpu_s: float = 0.0

    def __post_init__(self) -> None:
        self._cpu_s, _ = cpu_s_and_cpus(self.process_tree())

    def look(self) -> MachineUse:
        """Return what was used since the last look, and what GPUs and memory say now."""
        now, before = time.monotonic(), self._at
        cpu_s, cpus = cpu_s_and_cpus(self.process_tree())
        used_s, self._at, self._cpu_s = cpu_s - self._cpu_s, now, cpu_s
        bounds = [one for one in (len(cpus), self.granted, quota_of(self.cgroups)) if one]
        num_cpus = min(bounds) if cpus else None
        found, problem = self.gpus.read(patience_s=_PATIENCE_S) if self.gpus else ([], "")
        gpus = found or []
        fullest = max(gpus, key=lambda gpu: (gpu.memory_gib or 0.0) / (gpu.total_gib or 1.0), default=Gpu(name=""))
        busy = [gpu.busy for gpu in gpus if gpu.busy is not None]
        memory = psutil.virtual_memory()
        used, limit = used_and_limit(self.cgroups) or (memory.total - memory.available, memory.total)
        return MachineUse(
            node_rank=self.node_rank,
            node=self.node,
            at=time.time(),
            seconds=now - before,
            gpu_busy=fmean(busy) if busy else None,
            gpu_memory_gib=fullest.memory_gib,
            gpu_memory_total_gib=fullest.total_gib,
            gpu_problem=problem,
            num_cpus=num_cpus,
            # A process whose parent has ended is below the root no more, and takes what it has used along.
            cpu_busy=None if num_cpus is None else min(1.0, max(0.0, used_s) / (now - before) / num_cpus),
            memory_gib=used / GIB,
            memory_limit_gib=limit / GIB,
        )

    def process_tree(self) -> list[psutil.Process]:
        """Return the processes below the root, after it."""
        with suppress(psutil.Error):
            if self.root is not None:
                return [self.root, *(one for one in self.root.children(recursive=True) if one.pid != os.getpid())]
        return []


def cpu_s_and_cpus(found: Iterable[psutil.Process]) -> tuple[float, set[int]]:
    """Return the CPU seconds that processes, and their children that have ended, have used; and the CPUs that they may use.

    Those of the first one do not count where there are others: an agent, and Slurm's step process, may use more than the workers.
    """
    seconds, cpus = 0.0, list[set[int]]()
    for one in found:
        with suppress(psutil.Error, OSError):  # it has ended
            seconds += sum(one.cpu_times()[:4])  # user, system, and both of its children
            cpus.append(os.sched_getaffinity(one.pid))
    return seconds, set[int]().union(*(cpus[1:] or cpus))


def main(argv: Sequence[str] | None = None) -> int:
    """Sample until the standard input is closed."""
    arguments = _parse(argv)
    processes.die_with_process(arguments.parent)
    processes.ignore_stop_signals()
    granted, root = granted_cpus(os.environ), None
    with suppress(psutil.Error):
        root = None if arguments.root is None else psutil.Process(arguments.root)
    sampler = Sampler(
        node_rank=arguments.node_rank,
        node=node_name(os.environ),
        gpus=GpuReader(os.environ.get("CUDA_VISIBLE_DEVICES"), arguments.gpus) if arguments.gpus else None,
        root=root,
        granted=granted[1] if granted else None,
        cgroups=own_cgroups(),
    )
    looks: list[MachineUse] = []
    is_over = is_warned = False
    while not is_over:
        is_over = bool(select.select([0], [], [], SAMPLE_S)[0])
        looks.append(sampler.look())
        if not is_warned and (warning := memory_warning(looks[-1])):
            is_warned = True
            with suppress(OSError):
                sys.stderr.write(f"{warning}\n")
        if is_over or len(looks) == SAMPLES_PER_RECORD:
            if use := merge_uses(looks):
                with suppress(OSError):  # it is lost, and the next one is tried
                    append_use(RunDir(arguments.run), arguments.attempt, use)
            looks = []
    return 0


def memory_warning(use: MachineUse) -> str:
    """Return what the log says where memory is about to run out; else an empty text."""
    if use.memory_gib is None or use.memory_limit_gib is None or use.memory_gib < FULL_SHARE * use.memory_limit_gib:
        return ""
    return (
        f"warning: {use.memory_gib:.1f} of the {use.memory_limit_gib:.1f} GiB of memory that the job may use on {use.node} are in use; "
        "at the limit, the kernel kills one of its processes. Ask for more memory (`resources.mem_gb`), or for fewer loader processes (`data.num_workers`)"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ddp_hpc.cluster.machine.sampler", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="how many GPUs of this node the job has")
    parser.add_argument("--parent", type=int, required=True, help="the process beside which this one runs")
    parser.add_argument("--root", type=int, help="the process below which the workers are, where it is to be seen")
    return parser.parse_known_args(argv)[0]  # an agent that runs may be of an older version, and give more


if __name__ == "__main__":
    code = main()
    os._exit(code)  # a thread may be inside of a driver that does not answer
