"""Torchvision's own readers, on small files that are written here in the formats they read."""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets  # type: ignore[import-untyped]  # torchvision ships no types

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.recipes import torchvision_sets
from ddp_hpc.train.recipes.image_classification import build
from ddp_hpc.train.recipes.images import ImagesWanted


def write_mnist(data_dir: Path) -> None:
    """Write 6 training and 4 held-out images as idx files."""
    raw = data_dir / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in [("train", 6), ("t10k", 4)]:
        pixels = np.arange(count * 28 * 28, dtype=np.uint32).astype(np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x803, count, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + bytes(range(count)))


def write_photos(root: Path, classes: list[str], count: int = 2) -> None:
    """Write one directory a class, of photos that are wider than they are high."""
    generator = np.random.default_rng(0)
    for label in classes:
        (root / label).mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(0, 256, (30, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{index}.png")


def write_batch(path: Path, content: dict[str, Any]) -> list[str]:
    """Write one of CIFAR's files; return its name and checksum."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return [path.name, hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()]


def test_mnist_is_read_from_its_files_without_a_download(tmp_path: Path) -> None:
    write_mnist(tmp_path)

    recipe = build(dataset="mnist", data_dir=str(tmp_path), augment=False)

    image, label = recipe.train_data[5]
    grey = torch.arange(5 * 784, 6 * 784).to(torch.uint8).float().view(1, 28, 28) / 255
    assert (label, type(image)) == (5, torch.Tensor)
    assert torch.allclose(image, (grey - 0.1307) / 0.3081, atol=1e-6)
    assert len(recipe.eval_data) == 4  # type: ignore[arg-type]  # map-style data has a length
    assert recipe.model(torch.stack([image, image])).shape == (2, 10)


def test_grey_images_are_shown_in_three_channels_to_a_network_that_wants_colours(tmp_path: Path) -> None:
    write_mnist(tmp_path)

    recipe = build(dataset="mnist", data_dir=str(tmp_path), model="resnet18", image_size=32)

    image, _ = recipe.train_data[1]
    assert image.shape == (3, 32, 32)
    assert torch.equal(image[0], image[2])


def test_crops_follow_from_torchs_generator_and_held_out_images_do_not_vary(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    recipe = build(dataset="mnist", data_dir=str(tmp_path))
    assert recipe.eval_data is not None

    drawn = [(torch.manual_seed(seed), recipe.train_data[1][0])[1] for seed in (1, 1, 2)]
    held_out = [recipe.eval_data[1][0] for _ in range(2)]

    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(*held_out)


def test_cifar10_is_read_from_its_files(tmp_path: Path) -> None:
    """As torchvision reads it, with the checksums of the small files that stand for the large ones."""
    folder = tmp_path / datasets.CIFAR10.base_folder
    pixels = np.arange(3 * 3072, dtype=np.uint32).astype(np.uint8).reshape(3, 3072)
    batches = [
        write_batch(folder / name, {"data": pixels, "labels": [0, 3, 9]}) for name in ("data_batch_1", "test_batch")
    ]
    names = write_batch(folder / "batches.meta", {"label_names": [f"kind {number}" for number in range(10)]})

    class SmallCifar10(datasets.CIFAR10):  # type: ignore[misc]  # torchvision ships no types
        train_list = batches[:1]
        test_list = batches[1:]
        meta = {"filename": names[0], "key": "label_names", "md5": names[1]}  # noqa: RUF012  as torchvision has it

    small = torchvision_sets.CIFAR10._replace(
        open=lambda data_dir, train, may_write: SmallCifar10(data_dir, train=train, download=may_write)
    )

    _, held_out, num_classes = torchvision_sets.load(
        small, ImagesWanted(channels=3, image_size=32, data_dir=str(tmp_path))
    )

    image, label = held_out[1]
    colours = torch.from_numpy(pixels[1]).view(3, 32, 32).float() / 255
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (small.mean, small.std))
    assert (num_classes, label) == (10, 3)
    assert torch.allclose(image, (colours - mean) / std, atol=1e-6)


def test_a_directory_of_photos_has_a_class_a_directory(tmp_path: Path) -> None:
    write_photos(tmp_path / "train", ["ant", "bee", "cat"])
    write_photos(tmp_path / "val", ["ant", "bee", "cat"], count=1)

    recipe = build(dataset="image_folder", data_dir=str(tmp_path), image_size=16)

    assert (len(recipe.train_data), len(recipe.eval_data)) == (6, 3)  # type: ignore[arg-type]  # map-style
    assert [recipe.train_data[index][1] for index in range(6)] == [0, 0, 1, 1, 2, 2]
    assert recipe.train_data[0][0].shape == (3, 16, 16)
    assert len(recipe.model.get_parameter("fc.bias")) == 3


def test_classes_that_differ_between_the_two_parts_are_refused(tmp_path: Path) -> None:
    """Or else numbers would mean other classes when held-out images are scored."""
    write_photos(tmp_path / "train", ["ant", "bee", "cat"])
    write_photos(tmp_path / "val", ["ant", "cat"])

    with pytest.raises(ConfigError, match=r"classes in .* differ in bee\. A class is numbered by its place"):
        build(dataset="image_folder", data_dir=str(tmp_path))


def write_imagenet(data_dir: Path) -> None:
    """Write two of its classes as torchvision leaves them when it has unpacked the archives."""
    names = ["n01440764", "n01443537"]
    write_photos(data_dir / "train", names)
    write_photos(data_dir / "val", names)
    meanings = {"n01440764": ("tench", "Tinca tinca"), "n01443537": ("goldfish", "Carassius auratus")}
    torch.save((meanings, names), data_dir / "meta.bin")


def test_imagenet_is_read_where_its_archives_were_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_imagenet(tmp_path)
    monkeypatch.setattr(torchvision_sets, "_NUM_PHOTOS", (4, 4))

    recipe = build(dataset="imagenet", data_dir=str(tmp_path), model="resnet18", num_classes=1000, image_size=32)

    assert len(recipe.train_data) == 4  # type: ignore[arg-type]  # map-style data has a length
    assert recipe.train_data[3][0].shape == (3, 32, 32)
    assert list(recipe.metrics) == ["accuracy", "accuracy_top5"]


@pytest.mark.parametrize(("part", "found"), [("train", "(3, 4)"), ("val", "(4, 3)")])
def test_a_part_of_imagenet_whose_unpacking_was_interrupted_is_refused_and_to_be_removed(
    part: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchvision takes a part for unpacked once it has a directory."""
    write_imagenet(tmp_path)
    monkeypatch.setattr(torchvision_sets, "_NUM_PHOTOS", (4, 4))
    next((tmp_path / part).rglob("*.png")).unlink()

    with pytest.raises(
        ConfigError, match=rf"have {re.escape(found)} photos, but ImageNet has \(4, 4\): .* Remove the dir"
    ):
        build(dataset="imagenet", data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("dataset", "wanted"),
    [
        ("image_folder", "FileNotFoundError: .*put `train/CLASS/"),
        ("imagenet", "put `ILSVRC2012_devkit_t12.tar.gz`, `ILSVRC"),
    ],
)
def test_files_that_are_not_there_are_named_with_where_to_put_them(tmp_path: Path, dataset: str, wanted: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"`recipe.args.dataset` is '{dataset}'.* cannot open it in {tmp_path} .*{wanted}"
    ):
        build(dataset=dataset, data_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        (torchvision_sets.MNIST, "put `MNIST/raw/"),
        (torchvision_sets.CIFAR10, "put `cifar-10-python.tar.gz` there"),
    ],
    ids=["mnist", "cifar10"],
)
def test_a_machine_without_a_network_is_told_what_to_put_where(
    tmp_path: Path, source: torchvision_sets.TorchvisionSet, wanted: str
) -> None:
    def no_way_out(_data_dir: Path, _train: bool, _may_write: bool) -> None:
        raise URLError("Name or service not known")

    offline = source._replace(open=no_way_out)

    with pytest.raises(ConfigError, match=rf"in {tmp_path} .*URLError: <urlopen error Name or .*{wanted}"):
        torchvision_sets.load(offline, ImagesWanted(channels=3, image_size=32, data_dir=str(tmp_path)))


def test_a_data_dir_in_the_home_of_an_unknown_user_is_refused_and_not_made_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = ImagesWanted(channels=1, image_size=28, data_dir="~nosuchuser/data")

    with pytest.raises(
        ConfigError, match=r"`recipe\.args\.data_dir` is '~nosuchuser/data', but this host has no user 'nosuchuser'"
    ):
        torchvision_sets.load(torchvision_sets.MNIST, wanted)

    assert not list(tmp_path.iterdir())
