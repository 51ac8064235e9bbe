"""A small training with everything that can go wrong on a resume: batch norm, dropout, random augmentation."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe


class NoisyImages(Dataset[Any]):
    """Images that all three generators disturb, by index; slow to load if asked."""

    def __init__(self, num_samples: int, load_s: float) -> None:
        self._num_samples = num_samples
        self._load_s = load_s

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._load_s)
        image = torch.full((1, 6, 6), (index % 7) / 7) + 0.1 * torch.randn(1, 6, 6)
        image += random.random() + float(np.random.rand())  # noqa: NPY002  users' data does just this
        return image, index % 3


class Net(nn.Module):
    """Layers whose gradients come in another order than their parameters were made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 16, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, images: Tensor) -> Tensor:
        features = self.norm(self.conv(images)).relu().flatten(1)
        return self.head(self.dropout(self.hidden(features).relu()))  # type: ignore[no-any-return]  # a Tensor


def build(num_samples: int = 100, load_s: float = 0.0, width: int = 64) -> Recipe:
    """Return the recipe; `load_s` is the time that each sample takes."""
    return Recipe(
        model=Net(width),
        train_data=NoisyImages(num_samples, load_s),
        eval_data=NoisyImages(31, 0.0),
        loss=nn.CrossEntropyLoss(),
        metrics={"accuracy": lambda outputs, targets: (outputs.argmax(1) == targets).float()},
    )
