"""Scans of handwritten digits that come with the package (UCI, Alpaydin and Kaynak 1998; see NOTICE)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from ddp_hpc.train.recipes.images import ImagesWanted, LoadedImages

FILE = Path(__file__).with_name("digits.npz")
MEAN, STD = 0.305, 0.376
"""Of the pixels, scaled to 0..1."""
HELD_OUT_EVERY = 5
"""Samples 0, 5, 10, ... are held out: 360 of 1797, by the same writers as the others."""


def load(wanted: ImagesWanted) -> LoadedImages:
    """Return the digits as TensorDatasets, from which the loader takes a whole micro batch at once."""
    with np.load(FILE) as archive:
        images = torch.from_numpy(archive["images"]).unsqueeze(1).float() / 16
        labels = torch.from_numpy(archive["labels"]).long()
    if wanted.image_size != images.shape[-1]:
        images = functional.interpolate(images, (wanted.image_size, wanted.image_size), mode="bilinear")
    images = ((images - MEAN) / STD).repeat(1, wanted.channels, 1, 1)
    held_out = torch.arange(len(labels)) % HELD_OUT_EVERY == 0
    train = TensorDataset(images[~held_out], labels[~held_out])
    return RandomShift(train) if wanted.augment else train, TensorDataset(images[held_out], labels[held_out]), 10


class RandomShift(Dataset[tuple[Tensor, Tensor]]):
    """Images moved by up to one pixel up or down and left or right, filled with their darkest value."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self._dataset[index]
        height, width = image.shape[-2:]
        top, left = torch.randint(0, 3, (2,)).tolist()
        padded = functional.pad(image, [1] * 4, value=float(image.min()))
        return padded[:, top : top + height, left : left + width], label
