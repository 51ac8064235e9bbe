"""Trains a little, and ends on one rank in the way that its first argument names; the second is the rank."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, get_worker_info
from ways_to_end import ENDS  # type: ignore[import-not-found]  # it lies beside the copy of this file

OF_SLURM = {"preempt", "time-limit", "node-failure", "scancel", "cancel"}
HOW, VICTIM = sys.argv[1], int(sys.argv[2])


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if rank == VICTIM and index == 9:
            if HOW == "data":
                raise ValueError("label 12 is out of range")
            if HOW.startswith("loader-") and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL if HOW == "loader-kill" else signal.SIGSEGV)
        return torch.full((4,), float(index))


dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 1)
loader = DataLoader(Numbers(), batch_size=4, num_workers=1 if HOW.startswith("loader-") else 0)
for step, batch in enumerate(loader):
    model(batch).sum().backward()
    for one in model.parameters():
        dist.all_reduce(one.grad)  # type: ignore[arg-type]  # it is set after backward
    if step == 3 and HOW in OF_SLURM:
        Path("waits").touch()
        time.sleep(1000)
    if step == 3 and rank == VICTIM:
        if HOW == "nan":
            with torch.autograd.detect_anomaly():
                x = torch.zeros(1, requires_grad=True)
                (x / x).sqrt().sum().backward()
        if HOW in ENDS:
            ENDS[HOW]()
