"""How busy the nodes of an attempt are: what is written of each once a minute, and what it means for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_hpc.base.durable import append_json_line, read_end_of_file
from ddp_hpc.base.record import decode_record
from ddp_hpc.run.run_dir.paths import RunDir

FULL_SHARE = 0.9
"""From this share of the limit on, memory is about to run out."""
_MOST_READ_BYTES = 16 << 20
"""What is read of all nodes together, the newest records: it takes about half a second of a CPU."""
_TAIL_BYTES = 4096
"""The newest records of one node; one has about 300 bytes."""


@dataclass(frozen=True, kw_only=True)
class MachineUse:
    """One node over an interval: one line of its file. None: not known, which is never zero."""

    node_rank: int
    node: str
    at: float
    """The interval's end, in seconds since the epoch."""
    seconds: float
    """The interval's length."""
    gpu_busy: float | None = None
    """Share of the time in which some kernel ran, on the mean of the GPUs. A kernel of NCCL that waits for another rank runs, too."""
    gpu_memory_gib: float | None = None
    """The most that was used, by all processes, of the GPU that had the least left."""
    gpu_memory_total_gib: float | None = None
    gpu_problem: str = ""
    """Why nothing, or not all, is known of the GPUs."""
    num_cpus: float | None = None
    """How many CPUs the job may use on this node: by affinity, Slurm's grant and the cgroup's quota."""
    cpu_busy: float | None = None
    """The share of them that the workers, and what they have started, used."""
    memory_gib: float | None = None
    """The most that was used, without what the kernel can free (the page cache)."""
    memory_limit_gib: float | None = None
    """The limit of the job's cgroup; the node's memory, where there is none."""

    @property
    def memory_share(self) -> float | None:
        return _share(self.memory_gib, self.memory_limit_gib)


def append_use(run: RunDir, attempt: int, use: MachineUse) -> None:
    """Add a record to a node's file."""
    record = {
        name: round(value, 3) if isinstance(value, float) else value
        for name, value in asdict(use).items()
        if value not in (None, "")
    }
    append_json_line(run.machine_use(attempt, use.node_rank), record, durable=False)


def read_uses(run: RunDir, attempt: int, *, most_bytes: int = _MOST_READ_BYTES) -> list[MachineUse]:
    """Return the newest records of all nodes, node by node, oldest first: all of them, but for a long attempt on many nodes."""
    paths, lines = run.machine_use_paths(attempt), list[bytes]()
    for path in paths:
        lines += read_end_of_file(path, max(_TAIL_BYTES, most_bytes // len(paths)))[1].split(b"\n")
    uses = (decode_record(line, MachineUse) for line in lines)  # the first one of a node may have been cut
    return [use for use in uses if use is not None and use.seconds > 0]


def newest_uses(run: RunDir, attempt: int) -> list[MachineUse]:
    """Return the newest record of each node."""
    return [*{use.node_rank: use for use in read_uses(run, attempt, most_bytes=0)}.values()]


def merge_uses(uses: Sequence[MachineUse]) -> MachineUse | None:
    """Return several records as one, of the mean node: means by time, and memory where the least was left; None without any."""
    if not uses:
        return None
    newest = max(uses, key=lambda use: use.at)
    fullest = max(uses, key=lambda use: use.memory_share or 0.0)
    fullest_gpu = max(uses, key=lambda use: _share(use.gpu_memory_gib, use.gpu_memory_total_gib) or 0.0)
    lengths: dict[int, float] = {}
    for use in uses:
        lengths[use.node_rank] = lengths.get(use.node_rank, 0.0) + use.seconds
    return replace(
        fullest,
        at=newest.at,
        seconds=max(lengths.values()),
        gpu_busy=_mean_over_time(uses, lambda use: use.gpu_busy),
        gpu_memory_gib=fullest_gpu.gpu_memory_gib,
        gpu_memory_total_gib=fullest_gpu.gpu_memory_total_gib,
        gpu_problem=newest.gpu_problem,
        num_cpus=max((use.num_cpus for use in uses if use.num_cpus), default=None),
        cpu_busy=_mean_over_time(uses, lambda use: use.cpu_busy),
    )


def _mean_over_time(uses: Sequence[MachineUse], value: Callable[[MachineUse], float | None]) -> float | None:
    """Return the mean over the time in which the value is known."""
    known = [(one, use.seconds) for use in uses if (one := value(use)) is not None]
    return sum(one * seconds for one, seconds in known) / sum(seconds for _, seconds in known) if known else None


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def use_texts(use: MachineUse) -> list[str]:
    """Return what is known: `GPUs 35% busy, 61.0 of 80.0 GiB of GPU memory`, `16 CPUs a node 98% busy`, `memory 40.2 of 64.0 GiB on node3`."""
    gpus = [] if use.gpu_busy is None else [f"GPUs {use.gpu_busy:.0%} busy"]
    if use.gpu_problem and not gpus:
        gpus = [f"use of the GPUs is not known ({use.gpu_problem})"]
    if use.gpu_memory_gib is not None and use.gpu_memory_total_gib is not None:
        gpus.append(f"{use.gpu_memory_gib:.1f} of {use.gpu_memory_total_gib:.1f} GiB of GPU memory")
    cpus = "use of the CPUs is not known"
    if use.cpu_busy is not None and use.num_cpus is not None:
        cpus = f"{use.num_cpus:g} CPUs a node {use.cpu_busy:.0%} busy"
    memory = ""
    if use.memory_gib is not None and use.memory_limit_gib is not None:
        nearly = ", nearly all" if (use.memory_share or 0.0) >= FULL_SHARE else ""
        memory = f"memory {use.memory_gib:.1f} of {use.memory_limit_gib:.1f} GiB on {use.node}{nearly}"
    return [part for part in (", ".join(gpus), cpus, memory) if part]


def uses_as_json(uses: Sequence[MachineUse]) -> dict[str, Any] | None:
    """Return what `--json` prints as `machines`: all nodes as one, and the newest record of each; None where nothing was measured."""
    whole = merge_uses(uses)
    newest = {use.node_rank: use for use in sorted(uses, key=lambda use: use.at)}
    return None if whole is None else {**asdict(whole), "nodes": [asdict(newest[rank]) for rank in sorted(newest)]}
