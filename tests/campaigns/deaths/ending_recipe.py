"""A small recipe, one rank of which ends in the way that it is asked for."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info
from ways_to_end import ENDS  # type: ignore[import-not-found]  # it lies beside the copy of this file

from ddp_hpc.train.recipe import Recipe


class Samples(Dataset[Any]):
    """Ones; one rank cannot read its fifth sample, or its loader's process is killed there, if asked."""

    def __init__(self, how: str, rank: int) -> None:
        self._how = how
        self._rank = rank
        self._num_read = 0

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._num_read += 1
        if self._num_read == 5 and os.environ.get("RANK") == str(self._rank):
            if self._how == "data":
                raise ValueError("label 12 is out of range")
            if self._how.startswith("loader-") and get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL if self._how == "loader-kill" else signal.SIGSEGV)
        return torch.ones(4), torch.ones(1)


class Net(nn.Module):
    """A linear layer that ends one rank in its fourth step."""

    def __init__(self, how: str, rank: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self._how = how
        self._rank = rank
        self._num_calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self._num_calls += 1  # the rehearsal before the first step calls the model, too
        is_time = self._num_calls == 6 and torch.distributed.get_rank() == self._rank
        if is_time and self._how in ENDS:
            ENDS[self._how]()
        outputs: Tensor = self.linear(inputs)
        return outputs / 0.0 if is_time and self._how == "nan" else outputs


def build(how: str, rank: int) -> Recipe:
    """Return the recipe; `how` is a key of `ENDS`, or one of data, nan, loader-kill and loader-crash."""
    return Recipe(model=Net(how, rank), train_data=Samples(how, rank), loss=nn.MSELoss())
