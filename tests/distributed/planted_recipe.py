"""A tiny training in which one line is changed at a time, to see whether `ddp-hpc bisect` finds it (`planted.py`)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe

NUM_SAMPLES = 160
FLIP_AT = -1
"""The step in which one bit of a gradient is flipped."""
FLIP_ON = "0"
"""The rank on which."""
RELABELLED = -1
"""The sample that gets another label."""


class Rows(Dataset[tuple[Tensor, int]]):
    """Rows of a file, with noise."""

    def __init__(self) -> None:
        self._rows = torch.from_numpy(np.load(Path(__file__).with_name("rows.npy")))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self._rows[index]
        noisy = row + 0.1 * torch.randn(12)
        label = (index + (index == RELABELLED)) % 3
        return noisy, label


class Net(nn.Module):
    """A network with one of everything."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm: nn.Module = nn.LayerNorm(16, elementwise_affine=False)
        self.relu: nn.Module = nn.ReLU()
        self.second = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.third = nn.Linear(16, 3)
        nn.init.zeros_(self.third.bias)
        self.second.bias.requires_grad_(True)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.third.weight.register_hook(self._flipped)

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        hidden = self.relu(self.norm(self.first(rows)))
        hidden = self.second(hidden)
        return self.third(self.dropout(hidden.tanh()))  # type: ignore[no-any-return]  # a Tensor

    def _flipped(self, gradient: Tensor) -> Tensor:
        """Flip one bit of one number, in one step on one rank; a flip of the lowest bit would be rounded away in the moments."""
        if int(self.calls) != FLIP_AT or os.environ.get("RANK") != FLIP_ON:
            return gradient
        flipped = gradient.clone()
        flipped.view(torch.int32)[1, 2] ^= 1 << 18
        return flipped


def build() -> Recipe:
    """Return the recipe."""
    loss = nn.CrossEntropyLoss()
    return Recipe(model=Net(), train_data=Rows(), loss=loss)
