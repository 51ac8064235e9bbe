"""The built-in recipe: networks by name, images by name, and what is said where they cannot be."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.recipe import Recipe, build_recipe
from ddp_hpc.train.recipes.image_classification import accuracy, accuracy_top5, build
from ddp_hpc.train.recipes.mini_resnet import BasicBlock, MiniResNet


def all_of(data: Dataset[Any] | None) -> tuple[Tensor, Tensor]:
    """Return a TensorDataset's images and labels."""
    assert type(data) is TensorDataset  # the loader takes whole micro batches from these
    images, labels = data.tensors
    return images, labels


@pytest.mark.long
def test_digits_on_mini_resnet_need_no_torchvision() -> None:
    look = (
        "import sys; from ddp_hpc.train.recipe import build_recipe; build_recipe('image_classification', {}); "
        "print([name for name in sys.modules if name.split('.')[0] in ('torchvision', 'PIL')])"
    )

    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout

    assert found == "[]\n"


@pytest.mark.parametrize(
    ("args", "asked"),
    [
        ({"model": "resnet18"}, r"`recipe\.args\.model` is 'resnet18'"),
        ({"dataset": "cifar10"}, r"dataset` is 'cifar10'"),
    ],
)
def test_who_needs_torchvision_reads_how_to_install_the_one_for_this_pytorch(
    args: dict[str, Any], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # as where there is none

    with pytest.raises(ConfigError, match=rf"{asked}.*`pip install 'ddp_hpc\[vision\]' torch=={version('torch')}`"):
        build(**args)


def test_every_fifth_digit_is_held_out() -> None:
    first, second = build(), build()

    assert (len(all_of(first.train_data)[0]), len(all_of(first.eval_data)[0])) == (1437, 360)
    assert all_of(first.eval_data)[1][:3].tolist() == [0, 5, 0]  # the scans begin with 0, 1, 2, ..., 9, 0, 1, ...
    for data, same in [(first.train_data, second.train_data), (first.eval_data, second.eval_data)]:
        assert all(torch.equal(a, b) for a, b in zip(all_of(data), all_of(same), strict=True))


def test_digits_are_normalised() -> None:
    images, labels = all_of(build().train_data)

    assert images.shape[1:] == (1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert abs(images.mean()) < 0.01
    assert abs(images.std() - 1) < 0.01


def test_digits_come_in_any_size_and_in_the_channels_a_network_wants() -> None:
    recipe = build(model="resnet18", image_size=32)

    images, _ = all_of(recipe.train_data)
    assert images.shape[1:] == (3, 32, 32)
    assert torch.equal(images[:, 0], images[:, 2])
    assert recipe.model.eval()(images[:2]).shape == (2, 10)


def test_augmented_digits_are_shifted_as_torchs_generator_says() -> None:
    plain, _ = all_of(build().train_data)
    shifted = build(augment=True).train_data

    torch.manual_seed(1)
    many = [shifted[7][0] for _ in range(50)]
    torch.manual_seed(1)
    again = [shifted[7][0] for _ in range(50)]

    assert all(torch.equal(a, b) for a, b in zip(many, again, strict=True))
    assert len({tuple(image.flatten().tolist()) for image in many}) == 9  # a pixel each way, or none
    assert any(torch.equal(image, plain[7]) for image in many)
    assert {image.shape for image in many} == {(1, 8, 8)}
    assert type(build(augment=True).eval_data) is TensorDataset


@pytest.mark.long
def test_mini_resnet_learns_the_digits() -> None:
    torch.manual_seed(0)
    recipe = build()
    optimizer = torch.optim.SGD(recipe.model.parameters(), lr=0.05, momentum=0.9)
    images, labels = all_of(recipe.train_data)

    for _ in range(3):
        for rows in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            recipe.loss(recipe.model(images[rows]), labels[rows]).backward()
            optimizer.step()

    held_out, right = all_of(recipe.eval_data)
    with torch.no_grad():
        assert recipe.metrics["accuracy"](recipe.model.eval()(held_out), right).mean() > 0.8  # 0.9 or so, by CPU


def test_a_new_block_passes_its_shortcut_through() -> None:
    block = BasicBlock(4, 4, stride=1)
    x = torch.rand(2, 4, 8, 8)

    assert torch.equal(block(x), x)


@pytest.mark.parametrize(("in_channels", "size"), [(1, 4), (1, 28), (3, 33), (5, 64)])
def test_mini_resnet_takes_images_of_any_size_and_number_of_channels(in_channels: int, size: int) -> None:
    network = MiniResNet(in_channels=in_channels, num_classes=7, width=8)

    assert network(torch.rand(2, in_channels, size, size)).shape == (2, 7)


def test_mini_resnet_is_as_wide_as_asked() -> None:
    widths = [build(width=width).model.get_parameter("fc.weight").shape[1] for width in (8, 32)]

    assert widths == [32, 128]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "alexnet",
        "densenet121",
        "googlenet",
        "inception_v3",
        "maxvit_t",
        "mobilenet_v2",
        "resnet50",
        "swin_t",
        "vit_b_32",
    ],
)
def test_a_torchvision_classifier_is_made_by_its_name_with_one_output_a_class(name: str) -> None:
    size = 320 if name == "inception_v3" else 224
    with torch.device("meta"):  # shapes only: no weights are drawn, nothing is computed
        network = build(model=name, dataset="fake", image_size=size, num_classes=7, num_samples=4).model

        outputs = network.train()(torch.empty(2, 3, size, size))

    assert outputs.shape == (2, 7)


def test_fake_images_follow_from_their_index() -> None:
    recipe = build(dataset="fake", num_samples=10, num_classes=4, image_size=12)
    again = build(dataset="fake", num_samples=10, num_classes=4, image_size=12)
    assert recipe.eval_data is not None

    torch.manual_seed(3)  # has no say
    train = [recipe.train_data[index] for index in range(10)]
    held_out = [recipe.eval_data[index] for index in range(3)]

    assert [label for _, label in train] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert all(torch.equal(image, again.train_data[index][0]) for index, (image, _) in enumerate(train))
    assert len({image.sum().item() for image, _ in [*train, *held_out]}) == 13
    assert train[0][0].shape == (3, 12, 12)
    assert len(recipe.eval_data) == 3  # type: ignore[arg-type]  # map-style data has a length
    with pytest.raises(IndexError):
        recipe.train_data[10]


def test_the_loss_is_cross_entropy_with_the_smoothing_asked_for() -> None:
    recipe = build(label_smoothing=0.2)

    assert isinstance(recipe.loss, nn.CrossEntropyLoss)
    assert recipe.loss.label_smoothing == 0.2
    assert recipe.loss.reduction == "mean"


def test_metrics_give_one_value_a_sample() -> None:
    outputs = torch.tensor([[0.0, 9, 8, 7, 6, 5, 4], [9, 0, 8, 7, 6, 5, 4], [0, 9, 8, 7, 6, 5, 4]])
    targets = torch.tensor([1, 5, 0])

    assert accuracy(outputs, targets).tolist() == [1, 0, 0]
    assert accuracy_top5(outputs, targets).tolist() == [1, 1, 0]


@pytest.mark.parametrize(("num_classes", "names"), [(99, ["accuracy"]), (100, ["accuracy", "accuracy_top5"])])
def test_the_five_likeliest_count_where_there_are_many_classes(num_classes: int, names: list[str]) -> None:
    assert list(build(dataset="fake", num_classes=num_classes).metrics) == names


def test_more_classes_than_the_data_has_are_allowed() -> None:
    assert len(build(num_classes=12).model.get_parameter("fc.bias")) == 12


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"modle": "resnet18"}, "unexpected keyword argument 'modle'. Did you mean 'model'"),
        ({"model": "resnet19"}, "'resnet19', but that is neither 'mini_resnet' nor .* Did you mean 'resnet18'"),
        ({"model": "mini_restnet"}, "Did you mean 'mini_resnet'"),
        ({"dataset": "digit"}, "'digit', but that is not a built-in data set. Did you mean 'digits'.*docs/recipes.md"),
        ({"width": 0}, "`recipe.args.width` is 0, but it must be a whole number above zero"),
        ({"width": "wide"}, "`recipe.args.width` is 'wide'"),
        ({"width": True}, "`recipe.args.width` is True"),
        ({"model": "resnet18", "width": 8}, "`recipe.args.width` is 8, but only 'mini_resnet' has a width"),
        ({"image_size": -1}, "`recipe.args.image_size` is -1"),
        ({"num_classes": 3}, "`recipe.args.num_classes` is 3, but 'digits' has 10 classes"),
        ({"num_samples": 3}, "`recipe.args.num_samples` is 3, but the size of 'digits' is fixed"),
        ({"dataset": "fake", "num_samples": 1.5}, "`recipe.args.num_samples` is 1.5"),
        ({"augment": "yes"}, r"`recipe.args.augment` is 'yes', but `image_classification` takes bool"),
        ({"data_dir": 3}, "`recipe.args.data_dir` is 3, but it must be the path of a directory"),
        ({"label_smoothing": 1}, "`recipe.args.label_smoothing` is 1, but"),
        ({"label_smoothing": "much"}, "`recipe.args.label_smoothing` is 'much', but"),
        ({"model": "vit_b_16", "image_size": 30}, "'vit_b_16', but torchvision cannot build it for images of 30"),
        ({"model": "maxvit_t", "image_size": 30}, "'maxvit_t', but torchvision cannot build it for images of 30"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_key_and_what_is_wanted(args: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        build_recipe("image_classification", args)


def test_the_defaults_make_a_recipe_by_its_short_name() -> None:
    assert isinstance(build_recipe("image_classification", {}), Recipe)
