"""Which CPUs each worker of a node may use, and how many threads it computes with: never more than the job was given.

Where Slurm does not bind tasks (`TaskPlugin=task/none`), a process may use all CPUs of its node, whatever its job asked
for. Then workers take as many threads as the job was given, and stay unpinned: which CPUs are the job's, nobody knows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from ddp_hpc.base.processes import kernel_text
from ddp_hpc.cluster.rendezvous.worker_env import CPUS_BEFORE, Sourced, threads
from ddp_hpc.cluster.slurm.allocation import gpu_numbers, granted_cpus

FILE_SYSTEM_ROOT = Path("/")
"""Where /sys and /proc are looked for."""
_UNKNOWN_ID = -1


@dataclass(frozen=True, kw_only=True, order=True)
class Cpu:
    """A CPU as the kernel numbers it; sorting puts neighbours together."""

    package: int
    numa_node: int
    core: int
    """The lowest number among the hyper-threads of its core."""
    number: int


@dataclass(frozen=True, kw_only=True)
class CpuShares:
    """What the workers of a node compute with."""

    cpu_sets: tuple[tuple[int, ...], ...]
    """By local rank; all the same where workers share them."""
    threads: Sourced
    """How many each worker computes with."""
    note: str = ""
    """A note on it for the job's log."""


def restrict_to_cpus(cpus: Iterable[int], environ: MutableMapping[str, str]) -> None:
    """Keep this process to these CPUs, and note which it had: a run that its script submits gets them back."""
    environ[CPUS_BEFORE] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.sched_setaffinity(0, cpus)


def restore_cpu_affinity(environ: Mapping[str, str]) -> None:
    """Give this process the CPUs that a rank had from whose script it was started."""
    if cpus := _parse_cpus(environ.get(CPUS_BEFORE, "")):
        with suppress(OSError):  # none of them is here
            os.sched_setaffinity(0, cpus)


def share_node_cpus(environ: Mapping[str, str], num_workers: int, cpus_per_worker: int | None) -> CpuShares:
    """Return the shares of the workers of this node."""
    return share_cpus(
        read_cpus(sorted(os.sched_getaffinity(0))),
        num_workers,
        cpus_per_worker,
        granted=granted_cpus(environ),
        near=gpu_numa_nodes(environ, num_workers),
        num_on_node=os.cpu_count() or 0,
    )


def share_cpus(  # noqa: PLR0913  what there is, what is wanted, and what was given
    cpus: Sequence[Cpu],
    num_workers: int,
    cpus_per_worker: int | None,
    *,
    granted: tuple[int, int] | None = None,
    near: Sequence[int | None] = (),
    num_on_node: int = 0,
) -> CpuShares:
    """Assign CPUs to workers, neighbours together; workers share them all where there are too few.

    `granted` bounds them by what Slurm gave, `granted_cpus`; `near` names the NUMA node that each worker should be on.
    """
    everything = tuple(sorted(cpu.number for cpu in cpus))
    of_task, of_job = granted or (len(cpus), len(cpus))
    num_given = min(len(cpus), of_task)
    each = cpus_per_worker or num_given // num_workers
    fits = 0 < each * num_workers <= num_given
    computing = threads(num_given, num_workers, cpus_per_worker, source="Slurm" if granted else "this host")
    # A Slurm that counts cores binds to all hyper-threads of each.
    is_bound = len(cpus) <= of_job or (len({cpu.core for cpu in cpus}) <= of_job and len(cpus) < num_on_node)
    sets = _assign_near(sorted(cpus), num_workers, each, near) if fits and is_bound else [everything] * num_workers
    note = ""
    if not is_bound:
        note = (
            f"Slurm gave this job {of_job} CPUs of the node but does not bind the job to them, so it can use all "
            f"{len(cpus)}. Each worker computes with {computing.value} thread{'' if computing.value == '1' else 's'} and is not "
            "pinned to CPUs; you need do nothing"
        )
    return CpuShares(cpu_sets=tuple(sets), threads=computing, note=note)


def _assign_near(cpus: Sequence[Cpu], num_workers: int, each: int, near: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Give each worker CPUs of its NUMA node, if all nodes are known and large enough; else, consecutive CPUs."""
    wanted = list(near[:num_workers])
    on_node = {node: [cpu for cpu in cpus if cpu.numa_node == node] for node in set(wanted)}
    if len(wanted) < num_workers or any(len(on_node[node]) < each * wanted.count(node) for node in on_node):
        return _assign_in_order(cpus, num_workers, each)
    shares = {node: iter(_assign_in_order(here, wanted.count(node), each)) for node, here in on_node.items()}
    return [next(shares[node]) for node in wanted]


def _assign_in_order(cpus: Sequence[Cpu], num_workers: int, each: int) -> list[tuple[int, ...]]:
    """Give each worker cores of its own, as long as there are enough."""
    by_core: dict[int, list[int]] = {}
    for cpu in cpus:
        by_core.setdefault(cpu.core, []).append(cpu.number)
    whole, per_worker = list(by_core.values()), len(by_core) // num_workers
    mine = [whole[at * per_worker : (at + 1) * per_worker] for at in range(num_workers)]
    # One CPU of each core, then the second of each: a worker that wants few has cores to itself.
    parts = [[cpu for row in zip_longest(*cores) for cpu in row if cpu is not None] for cores in mine]
    if any(len(part) < each for part in parts):  # cores of several sizes, or fewer than workers
        numbers = list(chain.from_iterable(whole))
        parts = [numbers[at * each : (at + 1) * each] for at in range(num_workers)]
    return [tuple(sorted(part[:each])) for part in parts]


def read_cpus(numbers: Sequence[int], root: Path = FILE_SYSTEM_ROOT) -> list[Cpu]:
    """Return the topology of CPUs from /sys; a CPU that /sys does not show counts as a core of its own."""
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    numa_nodes = {
        cpu: int(one.name.removeprefix("node")) for one in folders for cpu in _parse_cpus(kernel_text(one / "cpulist"))
    }
    return [
        Cpu(
            package=_read_number(folder / "physical_package_id"),
            numa_node=numa_nodes.get(number, _UNKNOWN_ID),
            core=min(_parse_cpus(kernel_text(folder / "thread_siblings_list")) or [number]),
            number=number,
        )
        for number in numbers
        for folder in [root / f"sys/devices/system/cpu/cpu{number}/topology"]
    ]


def gpu_numa_nodes(environ: Mapping[str, str], num_workers: int, root: Path = FILE_SYSTEM_ROOT) -> list[int | None]:
    """Return the NUMA node of each worker's GPU by NVIDIA's driver; None where it is not known.

    CUDA counts GPUs in the order of their PCI buses, but Slurm's variables have the numbers of their devices. In a job whose devices
    Slurm constrains, CUDA counts the job's alone, from zero.
    """
    names = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    gpus = []
    for folder in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        text = kernel_text(folder / "information")
        facts = dict(re.findall(r"^(GPU UUID|Device Minor):\s*(\S+)", text, re.MULTILINE))
        node = _read_number(root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node")
        gpus.append((facts.get("GPU UUID"), facts.get("Device Minor"), node))
    numbers = gpu_numbers(environ)
    if names and names == [str(at) for at in range(len(numbers))]:
        gpus = [gpu for gpu in gpus if gpu[1] in numbers]
    known = {uuid: node for uuid, _, node in gpus} | {str(at): node for at, (*_, node) in enumerate(gpus)}
    names = names or [str(at) for at in range(len(gpus))]
    found = [known.get(name, _UNKNOWN_ID) for name in names[:num_workers]]
    return [None if node < 0 else node for node in found] + [None] * (num_workers - len(found))


def _read_number(path: Path) -> int:
    text = kernel_text(path).strip()
    return int(text) if re.fullmatch(r"\d+", text) else _UNKNOWN_ID


def _parse_cpus(text: str) -> list[int]:
    """Return the numbers in `0-3,8`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        with suppress(ValueError):
            found += range(int(first), int(last or first) + 1)
    return found
