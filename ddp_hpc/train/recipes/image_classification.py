"""The built-in recipe `image_classification`: a network and a set of images, both chosen by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.recipe import Recipe, did_you_mean_name, require
from ddp_hpc.train.recipes import digits, fake_images
from ddp_hpc.train.recipes import torchvision_sets as tv
from ddp_hpc.train.recipes.images import ImagesWanted, LoadedImages, check_counts
from ddp_hpc.train.recipes.mini_resnet import MiniResNet

IMAGE_SETS: Mapping[str, tuple[Callable[[ImagesWanted], LoadedImages], ImagesWanted]] = {
    "digits": (digits.load, ImagesWanted(channels=1, image_size=8)),
    "fake": (fake_images.load, ImagesWanted(channels=3, image_size=32)),
    "mnist": (partial(tv.load, tv.MNIST), ImagesWanted(channels=1, image_size=28, augment=True)),
    "cifar10": (partial(tv.load, tv.CIFAR10), ImagesWanted(channels=3, image_size=32, augment=True)),
    "image_folder": (partial(tv.load, tv.IMAGE_FOLDER), ImagesWanted(channels=3, image_size=224, augment=True)),
    "imagenet": (partial(tv.load, tv.IMAGENET), ImagesWanted(channels=3, image_size=224, augment=True)),
}
"""What `recipe.args.dataset` may be: how a set is loaded, and its usual form."""
MINI_RESNET = "mini_resnet"
MINI_RESNET_WIDTH = 16


def import_early(args: Mapping[str, Any]) -> None:
    """Import torchvision where `build` would with these arguments: the agent does it once for all workers of its node."""
    if args.get("model", MINI_RESNET) != MINI_RESNET or args.get("dataset", "digits") not in {"digits", "fake"}:
        with suppress(Exception):  # `build` says what is wrong, in the worker
            importlib.import_module("torchvision.transforms.v2")


def build(  # noqa: PLR0913  the arguments are the keys of `recipe.args`
    *,
    model: str = MINI_RESNET,
    dataset: str = "digits",
    width: int | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    augment: bool | None = None,
    label_smoothing: float = 0.0,
    data_dir: str | None = None,
    num_samples: int | None = None,
) -> Recipe:
    """Return a recipe that sorts images into classes.

    Args:
        model: `mini_resnet`, or the name of any torchvision classifier, such as `resnet50`.
        dataset: `digits`, `fake`, `mnist`, `cifar10`, `image_folder` or `imagenet`.
        width: Channels of MiniResNet's first stage; 16 when unset.
        num_classes: Outputs of the network; as many as the data has when unset.
        image_size: Pixels a side; the data's usual size when unset.
        augment: Vary the training's images at random; when unset, as is usual for the data.
        label_smoothing: Share of each target that is spread over all classes.
        data_dir: Where the files of a torchvision set are, or are downloaded to; `data` when unset.
        num_samples: Training samples of `fake`; 1024 when unset.
    """
    _check_model(model, width)
    is_share = isinstance(label_smoothing, int | float) and 0 <= label_smoothing < 1  # type: ignore[redundant-expr]  # as configured
    require(is_share, "recipe.args.label_smoothing", label_smoothing, "a number from 0 up to, not including, 1")
    wanted = _images_wanted(
        dataset,
        channels=None if model == MINI_RESNET else 3,
        num_classes=num_classes,
        image_size=image_size,
        augment=augment,
        data_dir=data_dir,
        num_samples=num_samples,
    )
    train, held_out, num_found = IMAGE_SETS[dataset][0](wanted)
    if wanted.num_classes is not None and wanted.num_classes < num_found:
        raise ConfigError(
            f"`recipe.args.num_classes` is {wanted.num_classes}, but {dataset!r} has {num_found} classes. "
            f"Leave it unset, or ask for {num_found} or more."
        )
    num_classes = wanted.num_classes or num_found
    network = (
        MiniResNet(in_channels=wanted.channels, num_classes=num_classes, width=width or MINI_RESNET_WIDTH)
        if model == MINI_RESNET
        else _torchvision_network(model, wanted, num_classes)
    )
    return Recipe(
        model=network,
        train_data=train,
        eval_data=held_out,
        loss=nn.CrossEntropyLoss(label_smoothing=label_smoothing),
        metrics={"accuracy": accuracy, **({"accuracy_top5": accuracy_top5} if num_classes >= 100 else {})},
    )


def _images_wanted(dataset: str, **asked: Any) -> ImagesWanted:
    """Return the usual form of a set, changed by what is asked for; None asks for nothing."""
    if dataset not in IMAGE_SETS:
        raise ConfigError(
            f"`recipe.args.dataset` is {dataset!r}, but that is not a built-in data set. {did_you_mean_name(dataset, IMAGE_SETS)} "
            "For your own data, write your own recipe: docs/recipes.md."
        )
    if dataset != "fake" and asked.get("num_samples") is not None:
        raise ConfigError(
            f"`recipe.args.num_samples` is {asked['num_samples']!r}, but the size of {dataset!r} is fixed. "
            "Leave it unset; only 'fake' can be of any size."
        )
    return replace(IMAGE_SETS[dataset][1], **{key: value for key, value in asked.items() if value is not None})


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the likeliest class is the right one, else 0."""
    return (outputs.argmax(dim=1) == targets).float()


def accuracy_top5(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the right class is among the five likeliest, else 0."""
    return (outputs.topk(5, dim=1).indices == targets.unsqueeze(1)).any(dim=1).float()


def _check_model(model: str, width: int | None) -> None:
    """Raise ConfigError for an unknown model, before any data is loaded."""
    check_counts(width=width)
    if model == MINI_RESNET:
        return
    tv.need_torchvision(f"`recipe.args.model` is {model!r}")
    from torchvision import models  # type: ignore[import-untyped]  # torchvision ships no types

    known = models.list_models(module=models)
    if model not in known:
        raise ConfigError(
            f"`recipe.args.model` is {model!r}, but that is neither {MINI_RESNET!r} nor a torchvision classifier. "
            f"{did_you_mean_name(model, [MINI_RESNET, *known])}"
        )
    if width is not None:
        raise ConfigError(
            f"`recipe.args.width` is {width}, but only {MINI_RESNET!r} has a width, not {model!r}. "
            "Leave out `width`, or choose a wider torchvision model."
        )


def _torchvision_network(model: str, wanted: ImagesWanted, num_classes: int) -> nn.Module:
    from torchvision import models

    size = wanted.image_size
    own_args: dict[str, dict[str, Any]] = {
        "googlenet": {"aux_logits": False, "init_weights": True},  # one output, as all the others have
        "inception_v3": {"aux_logits": False, "init_weights": True},
        "maxvit_t": {"input_size": (size, size)},
    }
    sized = {"image_size": size} if model.startswith("vit_") else {}
    try:
        network: nn.Module = models.get_model(
            model, weights=None, num_classes=num_classes, **own_args.get(model, sized)
        )
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"`recipe.args.model` is {model!r}, but torchvision cannot build it for images of {size} pixels "
            f"(`recipe.args.image_size`): {str(error).rstrip('.')}. Choose another size, or another model."
        ) from error
    return network
