"""Which data sets need no seed for each sample: only those that are proved to read no generator."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from ddp_hpc.train.data.loader import SeededDataset
from ddp_hpc.train.data.sample_order import MicroBatch, derive_seed
from ddp_hpc.train.data.seedless import reads_no_generator
from ddp_hpc.train.state import rng

NUM = 6
SEED, EPOCH = 5, 1
IMAGES, LABELS = torch.randn(NUM, 3), torch.arange(NUM)
TENSORS = TensorDataset(IMAGES, LABELS)


class InMemory(Dataset[Any]):
    """What the data sets below are made of."""

    def __init__(self, images: Any = IMAGES) -> None:
        self.images = images
        self.labels = LABELS.numpy()
        self.context = 2

    def __len__(self) -> int:
        return NUM


class Rows(InMemory):
    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.images[index], self.labels[index]


class Scaled(InMemory):
    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.images[index] / 255
        return {"image": image, "near": self.labels[index % self.context : index % self.context + self.context]}


class SeededByTorchsSeed(InMemory):
    def __getitem__(self, index: int) -> Any:
        return self.images[index] + np.random.default_rng(torch.initial_seed()).normal()


class SeededByTorchsState(InMemory):
    def __getitem__(self, index: int) -> Any:
        return self.images[index] + int(torch.get_rng_state()[:8].view(torch.int64))


class SeededByPythonsState(InMemory):
    def __getitem__(self, index: int) -> Any:
        return self.images[index] + random.getstate()[1][3]


class SeededByNumpysState(InMemory):
    def __getitem__(self, index: int) -> Any:
        return self.images[index] + int(np.random.get_state()[1][3])  # type: ignore[index]  # noqa: NPY002  # it is read as data sets do


class OfAll(InMemory):
    def __getitem__(self, index: int) -> Any:
        return self.images[index] + torch.rand(()) + random.random() + np.random.normal()  # noqa: NPY002  # as data sets do


class WithProperty(InMemory):
    @property
    def noise(self) -> float:
        return random.random()

    def __getitem__(self, index: int) -> Any:
        return self.images[index] + self.noise


class WithPropertyOverAttribute(Rows):
    def __init__(self) -> None:
        vars(self).update(labels=LABELS, noise=1.0)

    @property
    def noise(self) -> float:
        return random.random()

    def __getitem__(self, index: int) -> Any:
        return self.labels[index] + self.noise


class WithOwnLookup(Rows):
    def __getattribute__(self, name: str) -> Any:
        return torch.rand(NUM, 3) if name == "images" else super().__getattribute__(name)


class WithDefault(InMemory):
    def __getitem__(self, index: int, others: Any = SeededByPythonsState()) -> Any:  # noqa: B008  # that is what it is about
        return others[index]


class OfRebound(InMemory):
    def __getitem__(self, index: int) -> Any:
        self = NOISE  # type: ignore[assignment]  # noqa: PLW0642  # that is what it is about
        return self.images[index]


class WithOperator(InMemory):
    def __mod__(self, _: int) -> Tensor:
        return torch.rand(3)

    def __getitem__(self, _: int) -> Any:
        return self % 2


class OfGlobal(InMemory):
    def __getitem__(self, index: int) -> Any:
        return NOISE[index]


def of_closure(noise: Any) -> InMemory:
    class OfClosure(InMemory):
        def __getitem__(self, index: int) -> Any:
            return noise[index]

    return OfClosure()


class OwnTensor(Tensor):
    """What it does when it is indexed is its own matter."""


class Draws:
    def __init__(self) -> None:
        self.images = self

    def __getitem__(self, _: int) -> Tensor:
        return torch.rand(3)

    def __len__(self) -> int:
        return NUM


NOISE = Draws()
OBJECTS = np.array([None] * NUM)
PROVED: dict[str, Dataset[Any]] = {
    "tensors": TENSORS,
    "a part": Subset(TENSORS, range(NUM)),
    "a part of a part": Subset(Subset(TENSORS, list(range(NUM))), LABELS),  # type: ignore[arg-type]  # people pass tensors
    "several": ConcatDataset([Subset(TENSORS, [1, 2]), TENSORS]),
    "rows": Rows(),
    "rows of arrays": Rows(IMAGES.numpy()),
    "rows, scaled": Scaled(),
}
UNPROVED: dict[str, Dataset[Any]] = {
    "of torch's seed": SeededByTorchsSeed(),
    "of torch's state": SeededByTorchsState(),
    "of Python's state": SeededByPythonsState(),
    "of numpy's state": SeededByNumpysState(),
    "of draws": OfAll(),
    "a part of such": Subset(SeededByTorchsSeed(), range(NUM)),
    "several, one of them such": ConcatDataset([TENSORS, OfAll()]),
    "a property": WithProperty(),
    "a property that hides an attribute": WithPropertyOverAttribute(),
    "an own way to look up": WithOwnLookup(),
    "a default": WithDefault(),
    "another self": OfRebound(),
    "an operator": WithOperator(),
    "a closure": of_closure(NOISE),
    "a global": OfGlobal(),
    "a tensor of an own type": Rows(IMAGES.as_subclass(OwnTensor)),
    "tensors of an own type": TensorDataset(IMAGES.as_subclass(OwnTensor)),
    "rows of an own type": Rows(NOISE),
    "an array of objects": Rows(OBJECTS),
    "indices of an own type": Subset(TENSORS, NOISE),  # type: ignore[arg-type]  # that is what it is about
}


@pytest.mark.parametrize("dataset", PROVED.values(), ids=PROVED)
def test_a_data_set_that_only_looks_up_and_computes_is_proved_to_read_no_generator(dataset: Dataset[Any]) -> None:
    assert reads_no_generator(dataset)


@pytest.mark.parametrize("dataset", UNPROVED.values(), ids=UNPROVED)
def test_nothing_is_proved_of_a_data_set_that_may_run_other_code(dataset: Dataset[Any]) -> None:
    assert not reads_no_generator(dataset)


def expected(dataset: Dataset[Any], indices: tuple[int, ...]) -> list[Any]:
    """Return the samples, each read after all three generators got its seed."""
    samples = []
    for index in indices:
        seed = derive_seed("sample", SEED, EPOCH, index)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  # as data sets have it
        samples.append(dataset[index])
    return samples


def as_list(batch: Any) -> Any:
    return list(batch) if isinstance(batch, tuple) else batch


WITHOUT_BATCHES = ("an array of objects", "indices of an own type")
READ = {name: dataset for name, dataset in {**PROVED, **UNPROVED}.items() if name not in WITHOUT_BATCHES}


@pytest.mark.parametrize("dataset", READ.values(), ids=READ)
def test_each_sample_is_the_one_that_its_own_seed_gives(dataset: Dataset[Any]) -> None:
    indices = (4, 0, 3)
    before = rng.capture(torch.device("cpu"))

    found = SeededDataset(dataset, SEED).fetch_batch([MicroBatch(EPOCH, indices, 3)]).batch

    after = rng.capture(torch.device("cpu"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    with rng.preserve_states(torch.device("cpu")):
        torch.testing.assert_close(as_list(found), default_collate(expected(dataset, indices)), rtol=0, atol=0)


def collate_with_noise(samples: list[Any]) -> Tensor:
    return default_collate([image for image, _ in samples]) + torch.rand(())  # type: ignore[no-any-return]


def test_a_collate_fn_draws_by_the_seed_of_the_last_sample_of_any_data_set() -> None:
    fetch = SeededDataset(Subset(TENSORS, range(NUM)), SEED, collate_with_noise)

    found = fetch.fetch_batch([MicroBatch(EPOCH, (4, 0, 3), 3)]).batch

    with rng.preserve_states(torch.device("cpu")):
        assert torch.equal(found, collate_with_noise(expected(TENSORS, (4, 0, 3))))
