"""Which of the GPUs that it sees a worker takes."""

from __future__ import annotations

import pytest
import torch

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.process_group import RankInfo, choose_device, device_index, group_options


def place(local_rank: int, local_world_size: int) -> RankInfo:
    return RankInfo(
        rank=local_rank,
        local_rank=local_rank,
        world_size=local_world_size,
        local_world_size=local_world_size,
        node_rank=0,
        master_addr="127.0.0.1",
        master_port=1,
    )


@pytest.mark.parametrize(
    ("local_rank", "num_workers", "count", "may_be_alone", "index"),
    [(0, 1, 1, False, 0), (3, 4, 4, False, 3), (1, 2, 8, False, 1), (3, 4, 1, True, 0), (3, 4, 4, True, 3)],
)
def test_a_worker_takes_the_gpu_of_its_local_rank_or_the_one_that_it_is_shown(
    local_rank: int, num_workers: int, count: int, may_be_alone: bool, index: int
) -> None:
    assert device_index(place(local_rank, num_workers), count, visible=None, may_be_alone=may_be_alone) == index


@pytest.mark.parametrize(("count", "may_be_alone"), [(1, False), (2, False), (2, True)])
def test_fewer_gpus_than_workers_are_refused_with_what_was_found(count: int, may_be_alone: bool) -> None:
    with pytest.raises(ConfigError, match=rf"4 workers.*sees {count} GPUs here.*'0,1'.*no more workers"):
        device_index(place(1, 4), count, visible="0,1", may_be_alone=may_be_alone)


@pytest.mark.parametrize("may_be_alone", [True, False])
def test_a_pytorch_that_sees_no_gpu_is_said_with_what_may_be_wrong(may_be_alone: bool) -> None:
    with pytest.raises(ConfigError, match=r"sees none here.*'0,1'.*`ddp-hpc doctor` compares"):
        device_index(place(1, 4), 0, visible="0,1", may_be_alone=may_be_alone)


def test_mig_devices_that_cuda_does_not_show_are_counted_and_the_way_to_use_them_is_named() -> None:
    """CUDA shows one MIG device a process, however many are listed: all ranks would be on the first."""
    with pytest.raises(ConfigError, match=r"sees 1 GPUs here.*2 of these are MIG devices.*--gpus-per-task=1"):
        device_index(place(1, 2), 1, visible="MIG-5c7ab2e1,MIG-8d1f2b00", may_be_alone=False)


def test_a_run_on_cpus_takes_no_gpu() -> None:
    assert choose_device(place(1, 2), 0).type == "cpu"


def test_nccl_connects_the_ranks_of_gpus_while_they_join_and_gloo_those_of_cpus() -> None:
    gpu, cpu = torch.device("cuda", 1), torch.device("cpu")

    on_gpu, on_cpu = group_options(gpu, 60.0), group_options(cpu, 60.0)

    assert (on_gpu["backend"], on_gpu["device_id"]) == ("cpu:gloo,cuda:nccl", gpu)
    assert (on_cpu["backend"], "device_id" in on_cpu) == ("gloo", False)
    assert on_gpu["timeout"] < on_cpu["timeout"]
