"""The built-in sets of images, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.recipe import nearest_names
from ddp_hpc.train.recipes import digits, fake_images
from ddp_hpc.train.recipes import torchvision_sets as tv
from ddp_hpc.train.recipes.images import Images, ImagesWanted


class ImageSet(NamedTuple):
    """How a set is loaded, and its usual form."""

    load: Callable[[ImagesWanted], Images]
    usual: ImagesWanted


IMAGE_SETS = {
    "digits": ImageSet(digits.load, ImagesWanted(channels=1, image_size=8)),
    "fake": ImageSet(fake_images.load, ImagesWanted(channels=3, image_size=32)),
    "mnist": ImageSet(partial(tv.load, tv.MNIST), ImagesWanted(channels=1, image_size=28, augment=True)),
    "cifar10": ImageSet(partial(tv.load, tv.CIFAR10), ImagesWanted(channels=3, image_size=32, augment=True)),
    "image_folder": ImageSet(partial(tv.load, tv.IMAGE_FOLDER), ImagesWanted(channels=3, image_size=224, augment=True)),
    "imagenet": ImageSet(partial(tv.load, tv.IMAGENET), ImagesWanted(channels=3, image_size=224, augment=True)),
}
"""What `recipe.args.dataset` may be."""


def images_wanted(dataset: str, **asked: Any) -> ImagesWanted:
    """Return the usual form of a set, changed by what is asked for; None asks for nothing."""
    if dataset not in IMAGE_SETS:
        raise ConfigError(
            f"`recipe.args.dataset` is {dataset!r}, but that is not a built-in data set. {nearest_names(dataset, IMAGE_SETS)} "
            "For your own data, write your own recipe: docs/recipes.md."
        )
    if dataset != "fake" and asked.get("num_samples") is not None:
        raise ConfigError(
            f"`recipe.args.num_samples` is {asked['num_samples']!r}, but the size of {dataset!r} is fixed. "
            "Leave it unset; only 'fake' can be of any size."
        )
    return replace(IMAGE_SETS[dataset].usual, **{key: value for key, value in asked.items() if value is not None})


def load_images(dataset: str, wanted: ImagesWanted) -> Images:
    """Return the images; if they must be downloaded or unpacked, rank zero does it while the others wait."""
    images = IMAGE_SETS[dataset].load(wanted)
    if wanted.num_classes is not None and wanted.num_classes < images.num_classes:
        raise ConfigError(
            f"`recipe.args.num_classes` is {wanted.num_classes}, but {dataset!r} has {images.num_classes} classes. "
            f"Leave it unset, or ask for {images.num_classes} or more."
        )
    return replace(images, num_classes=wanted.num_classes or images.num_classes)
