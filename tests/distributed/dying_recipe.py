"""A small recipe that ends on rank 1 in the way that it is asked for."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe


def _fill_disk() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with Path("big.bin").open("wb", buffering=0) as file:
            file.write(bytes(10))
            file.write(bytes(10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)  # the logs are on another disk, as it were


def _fill_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    torch.zeros(1 << 40)


def _bind_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        socket.create_server(taken.getsockname())


def _raise() -> None:
    raise KeyError("no such key")


def _decoy() -> None:
    sys.stdout.write("warning: CUDA out of memory. Tried to allocate 2 GiB, retrying with a smaller batch\n")
    raise ArithmeticError("the mask is empty")


ENDS: Mapping[str, Callable[[], object]] = {
    "exception": _raise,
    "decoy": _decoy,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(3),
    "quit": lambda: os._exit(7),
    "import": lambda: import_module("no_such_module"),
    "disk": _fill_disk,
    "memory": _fill_memory,
    "port": _bind_twice,
    "dns": lambda: socket.getaddrinfo("no-such-host.invalid", 80),
    "hang": lambda: time.sleep(1000),
}


class Samples(Dataset[Any]):
    """Ones; one sample cannot be read if asked."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._how == "data" and index == 9:
            raise ValueError("label 12 is out of range")
        return torch.ones(4), torch.ones(1)


class Net(nn.Module):
    """A linear layer that ends rank 1 in its fourth step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self._how = how
        self._num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._num_calls += 1  # the rehearsal before the first step calls the model, too
        if self._num_calls == 6 and torch.distributed.get_rank() == 1 and self._how in ENDS:
            ENDS[self._how]()
        outputs: Tensor = self.linear(inputs)
        return outputs / 0.0 if self._how == "nan" else outputs


def build(how: str) -> Recipe:
    """Return the recipe; `how` is a key of `ENDS`, or "data" or "nan"."""
    return Recipe(model=Net(how), train_data=Samples(how), loss=nn.MSELoss())
