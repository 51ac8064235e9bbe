"""The built-in recipe `drill` for `ddp-hpc drill`: a small, slow training that uses every random generator."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe

NUM_CLASSES = 3
NUM_HELD_OUT = 31
IMAGE_SIZE = 6


class NoisyImages(Dataset[Any]):
    """Images with noise from all three random generators, so that a generator that is not restored changes the result."""

    def __init__(self, num_samples: int, sample_s: float) -> None:
        self._num_samples = num_samples
        self._sample_s = sample_s

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self._sample_s)
        image = torch.full((1, IMAGE_SIZE, IMAGE_SIZE), (index % 7) / 7) + 0.1 * torch.randn(1, IMAGE_SIZE, IMAGE_SIZE)
        image += random.random() + float(np.random.rand())  # noqa: NPY002  data sets of users do this
        return image, index % NUM_CLASSES


def build(*, num_samples: int = 480, sample_s: float = 0.0, width: int = 64) -> Recipe:
    """Return the recipe.

    Args:
        num_samples: Training samples.
        sample_s: Seconds that each of them takes to load, so that the run lasts long enough for a fault.
        width: Units of the hidden layer.
    """
    side = IMAGE_SIZE - 2
    return Recipe(
        model=nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * side * side, width),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(width, NUM_CLASSES),
        ),
        train_data=NoisyImages(num_samples, sample_s),
        eval_data=NoisyImages(NUM_HELD_OUT, 0.0),
        loss=nn.CrossEntropyLoss(),
    )
