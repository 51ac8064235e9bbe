"""From samples every few seconds to lines over longer intervals."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import psutil

from ddp_hpc.cluster.machine.cgroups import Cgroups, CpuLimit
from ddp_hpc.cluster.machine.gpus import GIB, GpuReader
from ddp_hpc.cluster.machine.processes import ProcessTree
from ddp_hpc.run.run_dir.machine_use import FIRST_LINE_S, GpuUse, MachineUse

SAMPLE_S = 5.0
"""The time between two samples."""
COST_SHARE = 0.0008
"""All that this process does takes at most this share of a CPU: with very many processes, or a slow driver, samples are rarer."""
MOST_LINE_S = 600.0
"""The longest time between two lines, where nodes are few."""
LINE_SHARE = 0.005
"""From `FIRST_LINE_S` on, the time grows with the attempt to this share of its age: a day has about 900 lines."""
LINES_A_SECOND = 6.4
"""How many lines all nodes together may write in a second, on average."""
WARN_SHARE = 0.9
"""From this share of the cgroup's limit on, memory is about to run out."""


def line_s(age_s: float, num_nodes: int) -> float:
    """Return the time between two lines of one node, `age_s` after the attempt's beginning."""
    return max(min(MOST_LINE_S, max(FIRST_LINE_S, LINE_SHARE * age_s)), num_nodes / LINES_A_SECOND)


@dataclass
class _Gpu:
    """What was read of one GPU since the last line."""

    busy: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    total: float | None = None

    def add(self, use: GpuUse) -> None:
        self.busy += [] if use.busy is None else [use.busy]
        self.memory += [] if use.memory_gib is None else [use.memory_gib]
        self.total = use.total_gib or self.total


@dataclass(kw_only=True)
class Sampler:
    """Samples one node."""

    node_rank: int
    node: str
    num_gpus: int
    gpus: GpuReader
    processes: ProcessTree | None
    """None where the workers' processes are not to be seen."""
    cgroups: Cgroups
    granted: int | None = None
    """How many CPUs Slurm has granted the job on this node."""
    clock: Callable[[], float] = time.monotonic
    """For lengths of time: the wall clock may be set, by hours."""
    wall_clock: Callable[[], float] = time.time
    cost_s: float = 0.0
    """The CPU time of this process since the sample before: looks, the driver's calls, writing."""
    _cpu_s: float = field(default_factory=time.process_time)
    _since: float | None = None
    _begin: CpuLimit = field(default_factory=CpuLimit)
    _used: list[float] = field(default_factory=list)
    _gpus: dict[str, _Gpu] = field(default_factory=dict)
    _gpu_problem: str = ""
    _memory: list[tuple[float, float, bool]] = field(default_factory=list)
    """Bytes used, bytes there are, and whether these are the node's."""
    _is_warned: bool = False

    def sample(self) -> str:
        """Look once; return a warning for the log, or an empty text. The first look is the beginning of the first line."""
        used = None if self.processes is None else self.processes.used_s()
        if self.num_gpus:
            self._note_gpus(*self.gpus.take())
        if self._since is None:
            self._since, self._begin = self.clock(), self.cgroups.cpu()
        elif used is not None:
            self._used.append(used)
        warning = self._note_memory()
        before, self._cpu_s = self._cpu_s, time.process_time()
        self.cost_s = self._cpu_s - before
        return warning

    def line(self) -> MachineUse | None:
        """Return what was sampled since the last line; None before a second sample."""
        now, since = self.clock(), self._since
        if since is None or now <= since:
            return None
        seconds, limit = now - since, self.cgroups.cpu()
        memory = max(self._memory, default=None)
        use = MachineUse(
            node_rank=self.node_rank,
            node=self.node,
            at=round(self.wall_clock(), 1),
            seconds=round(seconds, 1),
            num_gpus=self.num_gpus,
            gpus=tuple(_mean_of(name, one) for name, one in self._gpus.items()),
            gpu_problem=self._gpu_problem,
            num_cpus=self._num_cpus(limit),
            cpus_used=round(sum(self._used) / seconds, 2) if self._used else None,
            throttled=_rate(self._begin.throttled_s, limit.throttled_s, seconds),
            waiting=_rate(self._begin.waited_s, limit.waited_s, seconds),
            memory_gib=None if memory is None else round(memory[0] / GIB, 2),
            memory_limit_gib=None if memory is None else round(memory[1] / GIB, 2),
            is_memory_of_node=memory is not None and memory[2],
        )
        self._since, self._begin = now, limit
        self._used, self._gpus, self._memory = [], {}, []
        return use

    def _num_cpus(self, limit: CpuLimit) -> float | None:
        if self.processes is None or not self.processes.cpus:
            return None
        bounds: Iterable[float | None] = (len(self.processes.cpus), self.granted, limit.quota)
        return round(min(one for one in bounds if one), 2)

    def _note_gpus(self, uses: Sequence[GpuUse], problem: str) -> None:
        for use in uses:
            self._gpus.setdefault(use.name, _Gpu()).add(use)
        if uses or problem:
            self._gpu_problem = problem

    def _note_memory(self) -> str:
        use = self.cgroups.memory()
        if use is None:
            node = psutil.virtual_memory()
            self._memory.append((node.total - node.available, node.total, True))
            return ""
        self._memory.append((use.used, use.limit, False))
        if self._is_warned or use.used < WARN_SHARE * use.limit:
            return ""
        self._is_warned = True
        return (
            f"warning: the job uses {use.used / GIB:.1f} of the {use.limit / GIB:.1f} GiB of memory that it may use on {self.node}; "
            "at the limit, the kernel kills one of its processes. Ask for more memory (`resources.mem_gb`), or for fewer loader processes (`data.num_workers`)"
        )


def pause_s(cost_s: float) -> float:
    """Return the time until the next sample, after one that took `cost_s` of a CPU."""
    return max(SAMPLE_S, cost_s / COST_SHARE)


def _mean_of(name: str, gpu: _Gpu) -> GpuUse:
    return GpuUse(
        name=name,
        busy=round(fmean(gpu.busy), 3) if gpu.busy else None,
        memory_gib=round(max(gpu.memory), 2) if gpu.memory else None,
        total_gib=None if gpu.total is None else round(gpu.total, 2),
    )


def _rate(before: float | None, now: float | None, seconds: float) -> float | None:
    return None if before is None or now is None else round(max(0.0, now - before) / seconds, 4)
