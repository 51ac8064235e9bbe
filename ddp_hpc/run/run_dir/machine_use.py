"""How busy the machines of an attempt are: what each node's sampler writes, and what it means for all nodes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ddp_hpc.base.durable import json_object, open_private, open_record, read_json_lines
from ddp_hpc.run.run_dir.paths import RunDir

FIRST_LINE_S = 15.0
"""The shortest time between two lines of a node."""
_LARGEST = 2.0**63
_TAIL_BYTES = 16384
"""The newest lines of a file; one line of a node with 16 GPUs has about 1,500 bytes."""
RECENT_BYTES = 8 << 20
"""What is read for one sentence, of all nodes together: it takes about a second of a CPU."""


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """One GPU, or one part of a GPU (MIG), over an interval. None: not known, which is never zero."""

    name: str
    """As CUDA_VISIBLE_DEVICES names it: an index or a UUID."""
    busy: float | None = None
    """Share of the time in which some kernel ran, by NVML. A kernel of NCCL that waits for another rank counts as running."""
    memory_gib: float | None = None
    """The most that was used, by all processes."""
    total_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """One node over an interval: one line of its file. None: not known, which is never zero."""

    node_rank: int
    node: str
    at: float
    """The interval's end, in seconds since the epoch."""
    seconds: float
    """The interval's length."""
    num_gpus: int = 0
    """How many GPUs of this node the job asked for."""
    gpus: tuple[GpuUse, ...] = ()
    """Those whose state is known at least in part."""
    gpu_problem: str = ""
    """Why nothing, or not all, is known of the GPUs."""
    num_cpus: float | None = None
    """How many CPUs the job may use on this node: by affinity, Slurm's grant and the cgroup's quota."""
    cpus_used: float | None = None
    """CPU seconds of the workers and all that they have started, for each second."""
    throttled: float | None = None
    """Seconds for each second in which the cgroup's quota kept the threads of a CPU from running."""
    waiting: float | None = None
    """Share of the time in which some task waited for a CPU (the kernel's pressure stall information)."""
    memory_gib: float | None = None
    """The most that the job used, without what the kernel can free (the page cache); of the node, where there is no limit."""
    memory_limit_gib: float | None = None
    """The limit of the job's cgroup; the node's memory, where there is none."""
    is_memory_of_node: bool = False
    """Whether there is no such limit."""

    @property
    def cpu_busy(self) -> float | None:
        """The share of the job's CPUs that was used."""
        return None if self.cpus_used is None or not self.num_cpus else self.cpus_used / self.num_cpus

    @property
    def gpu_busy(self) -> float | None:
        """The mean of the GPUs that are known."""
        return _mean(one.busy for one in self.gpus)

    @property
    def gpu_memory_share(self) -> float | None:
        """Of the GPU with the least memory left."""
        return _most(_share(one.memory_gib, one.total_gib) for one in self.gpus)

    @property
    def memory_share(self) -> float | None:
        return _share(self.memory_gib, self.memory_limit_gib)


def append_use(run: RunDir, attempt: int, use: MachineUse) -> None:
    """Add a line to a node's file, in one write.

    Raises:
        OSError: if it cannot be written.
    """
    record = {
        key: value
        for key, value in asdict(use).items()
        if value is not None and value is not False and value not in ((), "")
    }
    # A line that a killed writer has left incomplete is ended by the line break before this one.
    with open_private(run.machine_use(attempt, use.node_rank), "ab", buffering=0) as file:
        file.write(b"\n" + json.dumps(record, separators=(",", ":")).encode() + b"\n")


def read_uses(run: RunDir, attempt: int) -> list[MachineUse]:
    """Return all lines of all nodes of an attempt, node by node, oldest first; empty where nothing was measured.

    Raises:
        OSError: if the file system does not answer.
    """
    return [
        use for path in run.machine_uses(attempt) for line in read_json_lines(path) if (use := _use(line)) is not None
    ]


def newest_uses(run: RunDir, attempt: int) -> list[MachineUse]:
    """Return the newest line of each node, by node rank; only the end of each file is read.

    Raises:
        OSError: if the file system does not answer.
    """
    found = [next(_newest_first(path, _TAIL_BYTES), None) for path in run.machine_uses(attempt)]
    return sorted((one for one in found if one is not None), key=lambda one: one.node_rank)


def recent_uses(run: RunDir, attempt: int) -> list[MachineUse]:
    """Return the newest lines of all nodes, node by node, oldest first: of a long attempt on many nodes, not all.

    Raises:
        OSError: if the file system does not answer.
    """
    paths = run.machine_uses(attempt)
    most_bytes = max(_TAIL_BYTES, RECENT_BYTES // max(1, len(paths)))
    return [use for path in paths for use in reversed(list(_newest_first(path, most_bytes)))]


def _newest_first(path: Path, most_bytes: int) -> Iterator[MachineUse]:
    with open_record(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most_bytes))
        lines = file.read(most_bytes).split(b"\n")
    for line in reversed(lines):
        record = json_object(line.decode("utf-8", errors="replace"))  # None: empty, or half written
        use = None if record is None else _use(record)
        if use is not None:
            yield use


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Several lines as one: of all nodes at one time, or of one or all nodes over a time."""

    num_nodes: int
    at: float
    seconds: float
    """The longest time that one node was measured."""
    num_gpus: int
    num_gpus_known: int
    """Whose use is known, at least for a part of the time."""
    gpu_busy: float | None
    """Share of the time in which some kernel ran, on the mean of the GPUs."""
    gpu_busy_least: float | None
    """Of the node where it is lowest."""
    gpu_least_node: str
    gpu_memory_share: float | None
    """Of the GPU that had the least memory left."""
    gpu_memory_gib: float | None
    gpu_memory_total_gib: float | None
    gpu_problem: str
    num_cpus: float | None
    """Of all nodes."""
    cpu_busy: float | None
    """CPU seconds used, as a share of those that the job may use."""
    cpu_busy_most: float | None
    """Of the node where it is highest."""
    cpu_busiest_node: str
    throttled: float | None
    waiting: float | None
    memory_share: float | None
    """Of the node with the least memory left."""
    memory_gib: float | None
    memory_limit_gib: float | None
    memory_node: str
    is_memory_of_node: bool


def summary_of(uses: Sequence[MachineUse]) -> Summary | None:
    """Return what the lines say together: means by time, and the nodes that stand out; None without any."""
    if not uses:
        return None
    nodes: dict[int, list[MachineUse]] = {}
    for use in uses:
        nodes.setdefault(use.node_rank, []).append(use)
    newest = [max(of_node, key=lambda use: use.at) for of_node in nodes.values()]
    gpu = {of_node[-1].node: _by_time(of_node, lambda use: use.gpu_busy) for of_node in nodes.values()}
    cpu = {of_node[-1].node: _by_time(of_node, lambda use: use.cpu_busy) for of_node in nodes.values()}
    idlest = min((one for one in gpu if gpu[one] is not None), key=lambda one: gpu[one] or 0.0, default="")
    busiest = max((one for one in cpu if cpu[one] is not None), key=lambda one: cpu[one] or 0.0, default="")
    fullest_gpu = max(
        (gpu for use in uses for gpu in use.gpus),
        key=lambda one: _share(one.memory_gib, one.total_gib) or -1.0,
        default=None,
    )
    fullest = max(uses, key=lambda use: use.memory_share or -1.0)
    cpus = [use.num_cpus for use in newest]
    return Summary(
        num_nodes=len(nodes),
        at=max(use.at for use in uses),
        seconds=max(sum(use.seconds for use in of_node) for of_node in nodes.values()),
        num_gpus=sum(use.num_gpus for use in newest),
        num_gpus_known=sum(
            max(sum(one.busy is not None for one in use.gpus) for use in of_node) for of_node in nodes.values()
        ),
        gpu_busy=_by_time(uses, lambda use: use.gpu_busy, lambda use: len(use.gpus)),
        gpu_busy_least=gpu.get(idlest),
        gpu_least_node=idlest,
        gpu_memory_share=None if fullest_gpu is None else _share(fullest_gpu.memory_gib, fullest_gpu.total_gib),
        gpu_memory_gib=None if fullest_gpu is None else fullest_gpu.memory_gib,
        gpu_memory_total_gib=None if fullest_gpu is None else fullest_gpu.total_gib,
        gpu_problem=next((use.gpu_problem for use in newest if use.gpu_problem), ""),
        num_cpus=None if None in cpus else sum(one or 0.0 for one in cpus),
        cpu_busy=_by_time(uses, lambda use: use.cpu_busy, lambda use: use.num_cpus or 0.0),
        cpu_busy_most=cpu.get(busiest),
        cpu_busiest_node=busiest,
        throttled=_by_time(uses, lambda use: use.throttled),
        waiting=_by_time(uses, lambda use: use.waiting),
        memory_share=fullest.memory_share,
        memory_gib=fullest.memory_gib,
        memory_limit_gib=fullest.memory_limit_gib,
        memory_node=fullest.node,
        is_memory_of_node=fullest.is_memory_of_node,
    )


def _by_time(
    uses: Iterable[MachineUse],
    value: Callable[[MachineUse], float | None],
    size: Callable[[MachineUse], float] = lambda _: 1.0,
) -> float | None:
    """Return the mean over the time in which the value is known."""
    known = [(one, use.seconds * size(use)) for use in uses if (one := value(use)) is not None]
    total = sum(weight for _, weight in known)
    return sum(one * weight for one, weight in known) / total if total > 0 else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


def _most(values: Iterable[float | None]) -> float | None:
    return max((one for one in values if one is not None), default=None)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


_OPTIONAL = (
    "num_cpus",
    "cpus_used",
    "throttled",
    "waiting",
    "memory_gib",
    "memory_limit_gib",
)


def _use(line: dict[str, Any]) -> MachineUse | None:
    node_rank, at, seconds = (_number(line.get(name)) for name in ("node_rank", "at", "seconds"))
    gpus = line.get("gpus") or []
    if node_rank is None or at is None or not seconds or seconds < 0 or not isinstance(gpus, list):
        return None
    return MachineUse(
        node_rank=int(node_rank),
        node=str(line.get("node", "")),
        at=at,
        seconds=seconds,
        num_gpus=int(_number(line.get("num_gpus")) or 0),
        gpus=tuple(_gpu(one) for one in gpus if isinstance(one, dict)),
        gpu_problem=str(line.get("gpu_problem", "")),
        is_memory_of_node=line.get("is_memory_of_node") is True,
        **{name: _number(line.get(name)) for name in _OPTIONAL},
    )


def _gpu(record: dict[str, Any]) -> GpuUse:
    numbers = {one.name: _number(record.get(one.name)) for one in fields(GpuUse) if one.name != "name"}
    return GpuUse(name=str(record.get("name", "")), **numbers)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if -_LARGEST <= value <= _LARGEST else None
