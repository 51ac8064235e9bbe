"""What `launch.py` starts: eight times this all-reduces once, however it was started, and rank zero stamps the time.

Run as a script it is what a user's script is under torchrun, with `--train` a training; `preload` and `main` make it a worker of our agent, `build`
a recipe of `ddp-hpc submit`. It imports nothing that a training would not.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ddp_hpc.train.recipe import Recipe

STAMP = "DDP_HPC_BENCH_STAMP"


def peer() -> None:
    """Join as torchrun's documentation says."""
    dist.init_process_group("gloo")
    _all_reduce_and_stamp()
    dist.destroy_process_group()


def training() -> None:
    """Train as the scripts of PyTorch's tutorials do, for one step; its gradients are the first all-reduce."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    _all_reduce_and_stamp()
    # What still uses a group keeps its threads alive, also as garbage (DDP has cycles). A thread of gloo that lets go of a tensor while
    # Python ends then ends the process with SIGABRT (PyTorch 2.15, Python 3.11: in `AsyncWork`'s destructor, by the interpreter's lock).
    del model, optimizer
    gc.collect()
    dist.destroy_process_group()


def preload(_run_path: str) -> None:
    """Have our module imported before the fork; torch is by now."""
    import ddp_hpc.train.process_group  # noqa: F401


def main(_run_path: str, environ: Mapping[str, str], *, attempt: int, listen_fd: int | None = None) -> int:
    """Join as our workers do."""
    from ddp_hpc.train import process_group

    del attempt
    process_group.join(process_group.rank_info_from_environ(environ), torch.device("cpu"), listen_fd=listen_fd)
    _all_reduce_and_stamp()
    process_group.leave_process_group()
    return 0


def build() -> Recipe:
    """All-reduce as soon as the real worker asks for its recipe, and return a tiny one."""
    from torch.utils.data import TensorDataset

    from ddp_hpc.train.recipe import Recipe

    _all_reduce_and_stamp()
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    return Recipe(model=torch.nn.Linear(4, 1), train_data=data, loss=torch.nn.functional.mse_loss)


def _all_reduce_and_stamp() -> None:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()
    if dist.get_rank() == 0:
        Path(os.environ[STAMP]).write_text(str(time.time()))


if __name__ == "__main__":
    training() if "--train" in sys.argv else peer()
