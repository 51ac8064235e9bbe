"""Generated images, for trials without data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from ddp_hpc.train.recipes.images import ImagesWanted, LoadedImages


def load(wanted: ImagesWanted) -> LoadedImages:
    """Return training images, and a quarter as many held-out images."""
    num_classes = wanted.num_classes or 10
    patterns = torch.randn(num_classes, wanted.channels, 4, 4, generator=torch.Generator().manual_seed(0))
    num = wanted.num_samples
    train, held_out = (
        FakeImages(patterns, wanted.image_size, seeds) for seeds in (range(num), range(num, num + -(-num // 4)))
    )
    return train, held_out, num_classes


class FakeImages(Dataset[tuple[Tensor, int]]):
    """Noise over a weak pattern of each class, so that the loss can fall; a sample depends only on its seed."""

    def __init__(self, patterns: Tensor, image_size: int, seeds: range) -> None:
        self._patterns = patterns
        self._size = (image_size, image_size)
        self._seeds = seeds

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        seed = self._seeds[index]
        label = seed % len(self._patterns)
        noise = torch.randn(self._patterns.shape[1], *self._size, generator=torch.Generator().manual_seed(seed))
        return noise + 0.3 * functional.interpolate(self._patterns[label : label + 1], self._size)[0], label
