"""The flight records of real processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ddp_hpc.cluster.slow_ranks.judge import judge
from ddp_hpc.cluster.slow_ranks.launches import read_launches
from ddp_hpc.cluster.slow_ranks.summary import RankReport

SLOW, STEPS = 1, 30


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    for step in range(STEPS):
        time.sleep(0.05 if rank == SLOW else 0.0)
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        if step % 10 == 0:
            dist.all_reduce(loss.detach())
    record = torch._C._distributed_c10d._dump_fr_trace_json()
    (folder / f"{rank}.json").write_bytes(record)
    dist.barrier()


def test_the_flight_records_that_pytorch_keeps_by_default_name_the_rank_that_is_slow(tmp_path: Path) -> None:
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                work(rank, tmp_path)
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)

    summaries = []
    for rank in range(2):
        kinds, launches = read_launches((tmp_path / f"{rank}.json").read_bytes())
        summaries.append(RankReport(rank=rank, world_size=2, node="node1", turn=1, kinds=kinds, launches=launches))
    verdict = judge(summaries)

    [slow] = verdict.slow
    assert slow.rank == SLOW
    assert slow.lost_s > 0.03
    assert verdict.num_steps >= 20
