"""Has a loader process die while another is being forked, and prints what the main thread hears of it.

python -m tests.unit.loader_dies_amid_fork held-back|at-once
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.utils.data import TensorDataset

from ddp_hpc.run.spec import DataSpec
from ddp_hpc.train.data import loader


def main() -> None:
    if sys.argv[1] == "at-once":
        vars(loader)["sigchld_blocked"] = contextlib.nullcontext  # what is to be shown to matter
    first = _begin()
    (victim,) = psutil.Process().children()
    os.register_at_fork(before=lambda: _kill(victim.pid))
    try:
        second = _begin()
    except RuntimeError as error:
        sys.stdout.write(f"told: {error}\n")
    else:
        sys.stdout.write(f"not told: {next(second)}\n")
    sys.stdout.flush()
    del first
    os._exit(0)


def _begin() -> Iterator[Any]:
    sampler = [[0], [0]]
    made = loader.make_loader(
        TensorDataset(torch.zeros(1)), sampler, data=DataSpec(num_workers=1), pin_memory=False, is_kept=True
    )
    return loader.start_loader(made)


def _kill(pid: int) -> None:
    """Kill a process, and return once this one has been sent the signal of its death."""
    if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


if __name__ == "__main__":
    main()
