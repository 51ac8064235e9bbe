"""Sets of images that torchvision can read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.run.config.fill_paths import refuse_unknown_home
from ddp_hpc.train.recipes.images import ImagesWanted, LoadedImages
from ddp_hpc.train.recipes.rank_zero_first import rank_zero_first


class TorchvisionSet(NamedTuple):
    """How torchvision opens a set, and the properties of its images."""

    name: str
    open: Callable[[Path, bool, bool], Any]
    """(data_dir, train, may_write) -> a torchvision dataset without transforms; `may_write` on rank zero only."""
    needs: str
    """Which files must be in `data_dir` on a machine without internet access."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    photos: bool
    """Images have different sizes, and training crops and scales them at random; otherwise all have one small size."""
    flip: bool
    """A mirror image is of the same class."""


def load(source: TorchvisionSet, wanted: ImagesWanted) -> LoadedImages:
    """Open a set; rank zero goes first, and downloads or unpacks it if necessary."""
    need_torchvision(f"`recipe.args.dataset` is {source.name!r}")
    refuse_unknown_home(wanted.data_dir, f"`recipe.args.data_dir` is {wanted.data_dir!r}")
    data_dir = Path(wanted.data_dir).expanduser().absolute()
    train, held_out = rank_zero_first(lambda may_write: _open_both(source, data_dir, may_write=may_write))
    if source.name == "imagenet" and (found := (len(train), len(held_out))) != _NUM_PHOTOS:
        raise ConfigError(
            f"{data_dir}/train and {data_dir}/val have {found} photos, but ImageNet has {_NUM_PHOTOS}: perhaps unpacking was interrupted. "
            "Remove the directory that has too few, so that its archive is unpacked again. For a part of ImageNet, ask for `image_folder`."
        )
    if train.classes != held_out.classes:
        odd = sorted(map(str, set(train.classes) ^ set(held_out.classes)))
        raise ConfigError(
            f"The training's and the held-out classes in {data_dir} differ in {shorten_names(odd, 5)}. "
            "A class is numbered by its place among the directories, so both parts must have the same ones."
        )
    train.transform = _transform(source, wanted, at_random=wanted.augment)
    held_out.transform = _transform(source, wanted, at_random=False)
    return train, held_out, len(train.classes)


def need_torchvision(asked: str) -> None:
    """Raise ConfigError where torchvision is not installed; `asked` says what needs it."""
    if find_spec("torchvision") is None:
        # Without the second requirement, pip takes the newest torchvision, and with it another PyTorch.
        raise ConfigError(
            f"{asked}, which needs torchvision, but {sys.executable} has none. Install the one for its PyTorch: "
            f"`pip install 'ddp_hpc[vision]' torch=={version('torch')}`."
        )


def _open_both(source: TorchvisionSet, data_dir: Path, *, may_write: bool) -> tuple[Any, Any]:
    try:
        return source.open(data_dir, True, may_write), source.open(data_dir, False, may_write)
    except Exception as error:
        said = " ".join(str(error).split())
        raise ConfigError(
            f"`recipe.args.dataset` is {source.name!r}, but torchvision cannot open it in {data_dir} "
            f"(`recipe.args.data_dir`), a directory that every node must see: {type(error).__name__}: {said} "
            f"If this machine cannot download, put {source.needs} there. If a download was interrupted, delete its incomplete files."
        ) from error


def _transform(source: TorchvisionSet, wanted: ImagesWanted, *, at_random: bool) -> Callable[[Any], Any]:
    """From a PIL image to a normalised tensor, without random changes, or cropped and mirrored `at_random`."""
    import torch
    from torchvision.transforms import v2  # type: ignore[import-untyped]  # torchvision ships no types

    size = wanted.image_size
    if source.photos:  # a margin of an eighth round the crop, as is usual: 256 for 224
        geometry = [v2.RandomResizedCrop(size)] if at_random else [v2.Resize(size * 8 // 7), v2.CenterCrop(size)]
    else:
        geometry = [v2.Resize(size), *([v2.RandomCrop(size, padding=size // 8)] if at_random else [])]
    if source.flip and at_random:
        geometry.append(v2.RandomHorizontalFlip())
    repeats = wanted.channels // len(source.mean)  # repeats the grey channel for a network that expects three
    return v2.Compose(  # type: ignore[no-any-return]  # torchvision ships no types
        [
            *geometry,
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            *([v2.RGB()] if repeats > 1 else []),
            v2.Normalize(source.mean * repeats, source.std * repeats),
            v2.ToPureTensor(),
        ]
    )


def _open(kind: str, data_dir: Path, train: bool, may_write: bool) -> Any:
    from torchvision import datasets  # type: ignore[import-untyped]  # likewise

    if kind == "ImageFolder":
        return datasets.ImageFolder(data_dir / ("train" if train else "val"))
    if kind == "ImageNet":  # it unpacks the archives, if that has not been begun
        return datasets.ImageNet(data_dir, split="train" if train else "val")
    return getattr(datasets, kind)(data_dir, train=train, download=may_write)


_NUM_PHOTOS = 1_281_167, 50_000
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

MNIST = TorchvisionSet(
    name="mnist",
    open=partial(_open, "MNIST"),
    needs="`MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz`",
    mean=(0.1307,),
    std=(0.3081,),
    photos=False,
    flip=False,
)
CIFAR10 = TorchvisionSet(
    name="cifar10",
    open=partial(_open, "CIFAR10"),
    needs="`cifar-10-python.tar.gz`",
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    photos=False,
    flip=True,
)
IMAGE_FOLDER = TorchvisionSet(
    name="image_folder",
    open=partial(_open, "ImageFolder"),
    needs="`train/CLASS/*.jpg` and `val/CLASS/*.jpg`",
    mean=IMAGENET_MEAN,
    std=IMAGENET_STD,
    photos=True,
    flip=True,
)
IMAGENET = IMAGE_FOLDER._replace(
    name="imagenet",
    open=partial(_open, "ImageNet"),
    needs="`ILSVRC2012_devkit_t12.tar.gz`, `ILSVRC2012_img_train.tar` and `ILSVRC2012_img_val.tar`",
)
