"""The form in which a set of images is requested, and the set that is returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from ddp_hpc.train.recipe import require


@dataclass(frozen=True, kw_only=True)
class ImagesWanted:
    """The form that the images should have, and where their files are."""

    channels: int
    image_size: int
    """Pixels a side."""
    augment: bool = False
    """Vary the training's images at random."""
    data_dir: str = "data"
    num_classes: int | None = None
    """Unset: as many as the set has."""
    num_samples: int = 1024
    """Number of training samples, if the set can be of any size."""

    def __post_init__(self) -> None:
        check_counts(image_size=self.image_size, num_classes=self.num_classes, num_samples=self.num_samples)
        require(isinstance(self.augment, bool), "recipe.args.augment", self.augment, "true or false")
        require(isinstance(self.data_dir, str), "recipe.args.data_dir", self.data_dir, "the path of a directory")


LoadedImages = tuple[Dataset[Any], Dataset[Any], int]
"""Training and held-out pairs of a float tensor (channels, height, width) and a class; and how many classes there are."""


def check_counts(**values: object) -> None:
    """Check that arguments are whole numbers above zero, or unset."""
    for name, value in values.items():
        is_count = value is None or (type(value) is int and value > 0)
        require(is_count, f"recipe.args.{name}", value, "a whole number above zero")
