"""A small training that fails where it is told to: at a sample, once or always."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe


class FaultySamples(Dataset[Any]):
    """Samples that take a while; one of them raises, if asked: once, if there is a file to remember it by."""

    def __init__(self, num_samples: int, load_s: float, raises_at: int, once: str, slow_while: str) -> None:
        self._num_samples = num_samples
        self._load_s = load_s
        self._raises_at = raises_at
        self._once = once
        self._slow_while = slow_while

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._load_s)
        if self._slow_while and Path(self._slow_while).exists():
            time.sleep(0.1)
        if index == self._raises_at and not (self._once and Path(self._once).exists()):
            if self._once:
                Path(self._once).touch()
            raise ValueError(f"sample {index} is out of luck")
        return torch.full((16,), (index % 7) / 7) + 0.1 * torch.randn(16), index % 3


def build(
    num_samples: int = 480, load_s: float = 0.002, raises_at: int = -1, once: str = "", slow_while: str = ""
) -> Recipe:
    """Return the recipe; `once` names a file that keeps a sample from raising again, `slow_while` one that slows it down."""
    return Recipe(
        model=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3)),
        train_data=FaultySamples(num_samples, load_s, raises_at, once, slow_while),
        loss=nn.CrossEntropyLoss(),
    )
