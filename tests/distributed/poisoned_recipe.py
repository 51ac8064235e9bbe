"""A small recipe whose samples fail by a plan: in which attempt, which sample, how, and after how many reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe


class Samples(Dataset[Any]):
    """Ones; some samples cannot be read."""

    def __init__(self, poison: Mapping[str, str], good_reads: int) -> None:
        self._poison = poison
        self._good_reads = good_reads
        self._num_reads = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        how = self._poison.get(str(index))
        if how is not None:
            self._num_reads += 1
            if self._num_reads > self._good_reads:
                if how == "eio":
                    raise OSError(5, "Input/output error")
                json.loads(Path("damaged.json").read_text())
        return torch.ones(4), torch.ones(1)


def build(plan: Sequence[Mapping[str, str]], good_reads: Sequence[int] = ()) -> Recipe:
    """Return the recipe; the plan's last entry holds for all later attempts. A file counts the attempts."""
    with Path("builds").open("a") as file:
        file.write(".")
    attempt = Path("builds").stat().st_size - 1
    Path("damaged.json").write_text("{")
    os.utime("damaged.json", (1000, 1000))
    reads = good_reads[attempt] if attempt < len(good_reads) else 0
    return Recipe(
        model=nn.Linear(4, 1), train_data=Samples(plan[min(attempt, len(plan) - 1)], reads), loss=nn.MSELoss()
    )
