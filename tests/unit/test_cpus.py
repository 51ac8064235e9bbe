"""Which CPUs workers get, on machines as /sys and /proc describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from ddp_hpc.cluster.slurm.allocation import granted_cpus
from ddp_hpc.job.node.cpus import Cpu, gpu_numa_nodes, read_cpus, share_cpus, share_node_cpus
from tests.unit.made_network import batch

PutMachine = Callable[..., None]


@pytest.fixture
def put_machine(tmp_path: Path) -> PutMachine:
    """Return how to lay out a machine numbered as Linux does: first one thread of each core, package by package."""

    def put(*, packages: int, cores: int, threads: int, numa_per_package: int = 1, offline: Iterable[int] = ()) -> None:
        num_cores, dark = packages * cores, set(offline)
        nodes: dict[int, list[int]] = {}
        for number in set(range(num_cores * threads)) - dark:
            core = number % num_cores
            siblings = [core + thread * num_cores for thread in range(threads)]
            folder = tmp_path / f"sys/devices/system/cpu/cpu{number}/topology"
            folder.mkdir(parents=True)
            (folder / "physical_package_id").write_text(f"{core // cores}\n")
            (folder / "thread_siblings_list").write_text(",".join(str(one) for one in siblings if one not in dark))
            nodes.setdefault(core * numa_per_package // cores, []).append(number)
        for node, numbers in nodes.items():
            folder = tmp_path / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(",".join(map(str, sorted(numbers))) + "\n")

    return put


def put_gpus(root: Path, numa_nodes: Sequence[int], minors: Sequence[int] | None = None) -> None:
    """Lay out what NVIDIA's driver and the bus tell of GPUs."""
    for at, (node, minor) in enumerate(zip(numa_nodes, minors or range(len(numa_nodes)), strict=True)):
        address = f"0000:{16 * at + 1:02x}:00.0"
        folder, device = root / "proc/driver/nvidia/gpus" / address, root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        device.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 17\nGPU UUID: \t GPU-{minor}{minor}-0\nDevice Minor: \t {minor}\n"
        )
        (device / "numa_node").write_text(f"{node}\n")


def cores_of(share: Iterable[int], num_cores: int) -> set[int]:
    return {number % num_cores for number in share}


@pytest.mark.parametrize(
    ("num_cpus", "num_workers", "cpus_per_worker", "sets", "num_threads"),
    [
        (4, 2, None, [(0, 1), (2, 3)], 2),
        (4, 1, None, [(0, 1, 2, 3)], 4),
        (5, 2, None, [(0, 1), (2, 3)], 2),
        (4, 2, 1, [(0,), (2,)], 1),
        (4, 2, 2, [(0, 1), (2, 3)], 2),
        (4, 2, 3, [(0, 1, 2, 3)] * 2, 1),
        (2, 3, None, [(0, 1)] * 3, 1),
        (2, 3, 1, [(0, 1)] * 3, 1),
        (2, 1, 8, [(0, 1)], 2),
    ],
)
def test_cpus_of_an_unknown_machine_are_dealt_out_or_shared_where_there_are_too_few(  # noqa: PLR0917  a row of a table
    num_cpus: int,
    num_workers: int,
    cpus_per_worker: int | None,
    sets: list[tuple[int, ...]],
    num_threads: int,
    tmp_path: Path,
) -> None:
    share = share_cpus(read_cpus(range(num_cpus), tmp_path), num_workers, cpus_per_worker)

    assert (list(share.cpu_sets), share.threads.value) == (sets, str(num_threads))


def test_two_sockets_with_hyper_threads_give_each_worker_whole_cores_of_one_socket(
    put_machine: PutMachine, tmp_path: Path
) -> None:
    put_machine(packages=2, cores=32, threads=2)

    share = share_cpus(read_cpus(range(128), tmp_path), 4, 32)

    assert share.cpu_sets == tuple((*range(at, at + 16), *range(at + 64, at + 80)) for at in (0, 16, 32, 48))


def test_workers_that_want_few_cpus_have_cores_to_themselves(put_machine: PutMachine, tmp_path: Path) -> None:
    put_machine(packages=2, cores=4, threads=2)

    share = share_cpus(read_cpus(range(16), tmp_path), 2, 3)

    assert share.cpu_sets == ((0, 1, 2), (4, 5, 6))


def test_a_share_keeps_to_one_numa_node_of_a_package_that_has_four(put_machine: PutMachine, tmp_path: Path) -> None:
    """AMD's NPS4: two packages of 64 cores, sixteen in each of eight NUMA nodes."""
    put_machine(packages=2, cores=64, threads=2, numa_per_package=4)

    share = share_cpus(read_cpus(range(256), tmp_path), 8, None)

    assert [cores_of(one, 128) for one in share.cpu_sets] == [set(range(16 * at, 16 * at + 16)) for at in range(8)]


def test_without_hyper_threads_workers_get_neighbours(put_machine: PutMachine, tmp_path: Path) -> None:
    put_machine(packages=2, cores=24, threads=1)

    share = share_cpus(read_cpus(range(48), tmp_path), 4, None)

    assert share.cpu_sets == tuple(tuple(range(at, at + 12)) for at in (0, 12, 24, 36))


def test_cpus_that_are_offline_are_nobodys_and_cores_are_shared_only_where_they_must(
    put_machine: PutMachine, tmp_path: Path
) -> None:
    put_machine(packages=1, cores=4, threads=2, offline=[5, 6])

    share = share_cpus(read_cpus([0, 1, 2, 3, 4, 7], tmp_path), 2, None)

    assert sorted(number for one in share.cpu_sets for number in one) == [0, 1, 2, 3, 4, 7]
    first, second = (cores_of(one, 4) for one in share.cpu_sets)
    assert first.isdisjoint(second)


@pytest.mark.parametrize("allowed", [[*range(8, 16), *range(72, 80)], [3, 67, 40, 104], [1, 2, 3, 5, 8, 13, 21, 34]])
def test_workers_stay_within_the_cpus_that_a_cgroup_leaves(
    allowed: list[int], put_machine: PutMachine, tmp_path: Path
) -> None:
    put_machine(packages=2, cores=32, threads=2)

    share = share_cpus(read_cpus(allowed, tmp_path), 2, None)

    first, second = share.cpu_sets
    assert sorted([*first, *second]) == sorted(allowed)
    assert cores_of(first, 64).isdisjoint(cores_of(second, 64))


# --- near their GPUs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "numa_nodes"),
    [
        ({}, [1, 1, 0, 0]),
        ({"CUDA_VISIBLE_DEVICES": "3,0,2,1"}, [0, 1, 0, 1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-22-0,GPU-00-0"}, [0, 1, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_GPUS": "2,3"}, [0, 0, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "1,2", "SLURM_JOB_GPUS": "0,1,2,3"}, [1, 0, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2,MIG-3,MIG-4"}, [None] * 4),
        ({"CUDA_VISIBLE_DEVICES": "nonsense"}, [None] * 4),
    ],
)
def test_the_numa_node_of_each_workers_gpu_is_found(
    environ: Mapping[str, str], numa_nodes: list[int | None], tmp_path: Path
) -> None:
    put_gpus(tmp_path, [1, 1, 0, 0])

    assert gpu_numa_nodes(environ, 4, tmp_path) == numa_nodes


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, [3, 3, 1, 1]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_GPUS": "0,1"}, [1, 1, None, None]),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_STEP_GPUS": "2,3"}, [1, 1, None, None]),  # Slurm constrains no device
        ({"CUDA_VISIBLE_DEVICES": "GPU-22-0"}, [3, None, None, None]),
    ],
)
def test_gpus_count_by_their_buses_though_their_devices_have_other_numbers(
    environ: Mapping[str, str], found: list[int | None], tmp_path: Path
) -> None:
    put_gpus(tmp_path, [3, 3, 1, 1], minors=[2, 3, 0, 1])  # as in an HGX A100

    assert gpu_numa_nodes(environ, 4, tmp_path) == found


def test_workers_get_cpus_beside_their_gpus(put_machine: PutMachine, tmp_path: Path) -> None:
    put_machine(packages=2, cores=8, threads=2)
    cpus = read_cpus(range(32), tmp_path)

    crossed = share_cpus(cpus, 4, None, near=[1, 1, 0, 0])

    assert [cores_of(one, 16) for one in crossed.cpu_sets] == [set(range(at, at + 4)) for at in (8, 12, 0, 4)]


@pytest.mark.parametrize("near", [[0, 0, 0, 0], [1, None, 0, 0], []])
def test_where_gpus_are_unknown_or_crowd_one_numa_node_all_cpus_are_used(
    near: list[int | None], put_machine: PutMachine, tmp_path: Path
) -> None:
    put_machine(packages=2, cores=8, threads=2)
    cpus = read_cpus(range(32), tmp_path)

    assert share_cpus(cpus, 4, None, near=near) == share_cpus(cpus, 4, None)


# --- no more than the job was given ----------------------------------------------------------------------------------------


def many(count: int) -> list[Cpu]:
    return [Cpu(package=0, numa_node=0, core=number, number=number) for number in range(count)]


@pytest.mark.parametrize(
    ("num_cpus", "of_task", "of_job", "asked", "num_threads", "is_pinned"),
    [
        (128, 4, 4, None, 2, False),
        (128, 4, 4, 2, 2, False),
        (128, 4, 4, 8, 1, False),
        (128, 1, 1, None, 1, False),
        (4, 4, 4, None, 2, True),
        (8, 4, 8, None, 2, True),  # a core is two CPUs: Slurm gives whole ones
        (128, 8, 128, None, 4, True),  # the node is the job's alone
        (2, 4, 4, None, 1, True),  # somebody restricts it further
    ],
)
def test_threads_and_pinning_are_bounded_by_what_slurm_gave(  # noqa: PLR0917  a row of a table
    num_cpus: int, of_task: int, of_job: int, asked: int | None, num_threads: int, is_pinned: bool
) -> None:
    share = share_cpus(many(num_cpus), 2, asked, granted=(of_task, of_job))

    first, second = share.cpu_sets
    assert share.threads.value == str(num_threads)
    assert set(first).isdisjoint(second) is is_pinned
    assert bool(share.note) is not is_pinned


@pytest.mark.parametrize(("num_on_node", "is_pinned"), [(64, True), (32, False)])
def test_a_slurm_that_counts_cores_binds_to_all_their_hyper_threads(
    num_on_node: int, is_pinned: bool, put_machine: PutMachine, tmp_path: Path
) -> None:
    put_machine(packages=1, cores=16, threads=2)

    share = share_cpus(read_cpus(range(32), tmp_path), 2, None, granted=(16, 16), num_on_node=num_on_node)

    first, second = share.cpu_sets
    assert share.threads.value == "8"
    assert (len(cores_of(first, 16)), cores_of(first, 16).isdisjoint(cores_of(second, 16))) == (
        8 if is_pinned else 16,
        is_pinned,
    )


def test_the_note_tells_what_was_given_and_what_was_found() -> None:
    note = share_cpus(many(128), 2, None, granted=(4, 4)).note

    assert "4 CPUs" in note
    assert "128" in note
    assert "computes with 2 threads" in note


STEP = {
    "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "16,6",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        (batch("node[1-2]", "1(x2)", SLURM_CPUS_ON_NODE="8"), (8, 8)),
        ({**batch("node[1-2]", "1(x2)"), "SLURM_CPUS_ON_NODE": "", **STEP, "SLURMD_NODENAME": "node2"}, None),
        (
            {**batch("node[1-2]", "1(x2)", on="node2"), **STEP, "SLURM_CPUS_PER_TASK": "4"},
            (4, 6),
        ),
        (
            {**batch("node[1-2]", "1(x2)", on="node2"), **STEP, "SLURM_CPUS_ON_NODE": "6"},
            (6, 6),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}, None),
        (batch("node1", "1", SLURM_JOB_CPUS_PER_NODE="many"), None),
    ],
)
def test_slurms_variables_tell_what_was_given(environ: Mapping[str, str], found: tuple[int, int] | None) -> None:
    assert granted_cpus(environ) == found


def test_in_a_job_that_was_given_one_cpu_one_thread_computes_on_this_machine_too() -> None:
    environ = batch("node1", "1", SLURM_CPUS_ON_NODE="1", SLURM_JOB_CPUS_PER_NODE="1")

    assert share_node_cpus(environ, 1, None).threads.value == "1"
