"""From the order of samples to tensors: the same, whoever does the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset
from torch.utils.data._utils.pin_memory import pin_memory

from ddp_hpc.run.spec import DataSpec
from ddp_hpc.train.data.loader import FetchedBatch, LoadedGlobalBatch, load_global_batches, to_device
from ddp_hpc.train.data.sample_order import GlobalBatch, Position, RankSampler, SampleOrder
from ddp_hpc.train.state import rng
from tests.distributed.trial_recipe import NoisyImages

CPU = torch.device("cpu")
NUM_SAMPLES = 10
Samples = dict[tuple[int, int], Tensor]
"""Images by epoch and index."""


def load(
    dataset: Dataset[Any],
    *,
    world_size: int = 1,
    num_workers: int = 0,
    rank: int = 0,
    start: Position = Position(),
) -> Iterator[LoadedGlobalBatch]:
    """RankSampler through two epochs of ten samples in windows of four, as one rank."""
    order = SampleOrder(
        num_samples=NUM_SAMPLES, seed=5, global_batch_size=4, micro_batch_size=2 // world_size, world_size=world_size
    )
    walk = RankSampler(order=order, start=start, total_steps=2 * order.steps_per_epoch, rank=rank)
    return load_global_batches(dataset, walk, data=DataSpec(num_workers=num_workers), pin_memory=False)


def by_sample(loaded: Iterator[LoadedGlobalBatch]) -> Samples:
    """Return what was loaded, by sample."""
    return {
        (plan.epoch, index): image
        for whole, parts in loaded
        for plan, fetched in zip(whole.micro_batches, parts, strict=True)
        for index, image in zip(fetched.indices[: plan.num_real], fetched.batch[0], strict=False)
    }


def are_equal(first: Samples, second: Samples) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_augmentation_does_not_depend_on_the_process_that_does_it() -> None:
    images = NoisyImages(NUM_SAMPLES, 0.0)

    in_the_worker, in_loaders = by_sample(load(images)), by_sample(load(images, num_workers=2))

    assert len(in_the_worker) == 2 * NUM_SAMPLES
    assert are_equal(in_the_worker, in_loaders)


def test_augmentation_does_not_depend_on_the_world() -> None:
    images = NoisyImages(NUM_SAMPLES, 0.0)

    alone = by_sample(load(images))
    together = by_sample(load(images, world_size=2, rank=0)) | by_sample(load(images, world_size=2, rank=1))

    assert are_equal(alone, together)


def test_augmentation_does_not_depend_on_where_a_run_was_resumed() -> None:
    images = NoisyImages(NUM_SAMPLES, 0.0)

    unbroken = by_sample(load(images))
    resumed = by_sample(load(images, start=Position(step=4, epoch=1, samples_in_epoch=4)))

    assert len(resumed) == 6
    assert are_equal(resumed, {key: unbroken[key] for key in resumed})


def test_augmentation_differs_between_epochs_and_samples() -> None:
    samples = by_sample(load(NoisyImages(NUM_SAMPLES, 0.0)))

    assert len({image.numpy().tobytes() for image in samples.values()}) == 2 * NUM_SAMPLES


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_leaves_the_trainings_own_generators_alone(num_workers: int) -> None:
    before = rng.capture(CPU)

    by_sample(load(NoisyImages(NUM_SAMPLES, 0.0), num_workers=num_workers))

    after = rng.capture(CPU)
    assert all(torch.equal(before[name], after[name]) for name in before)


class OneByOne(Dataset[Any]):
    """A `TensorDataset` whose type the loader does not see."""

    def __init__(self, data: TensorDataset) -> None:
        self._data = data

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self._data[index]  # type: ignore[no-any-return]  # a TensorDataset's rows are tuples


def test_rows_of_tensors_taken_at_once_are_those_taken_one_by_one() -> None:
    data = TensorDataset(torch.randn(NUM_SAMPLES, 3), torch.arange(NUM_SAMPLES))

    pairs = list(zip(load(data), load(OneByOne(data)), strict=True))

    assert len(pairs) == 6
    for at_once, one_by_one in pairs:
        for left, right in zip(at_once[1], one_by_one[1], strict=True):
            assert left.indices == right.indices
            assert all(torch.equal(*columns) for columns in zip(left.batch, right.batch, strict=True))


class CountedSampler(RankSampler):
    """Records the step after each global batch that is computed."""

    made: list[int] = []  # noqa: RUF012  # the class is frozen, the list is not

    def __iter__(self) -> Iterator[GlobalBatch]:
        for global_batch in super().__iter__():
            self.made.append(global_batch.after.step)
            yield global_batch


IMAGES = torch.randn(NUM_SAMPLES, 3, 4, 4)
ROWS = {
    "numbers": torch.arange(NUM_SAMPLES),
    "truths": torch.arange(NUM_SAMPLES) % 2 == 0,
    "images": IMAGES,
    "images, channels last": IMAGES.contiguous(memory_format=torch.channels_last),
    "images of one channel, channels last": IMAGES[:, :1].contiguous(memory_format=torch.channels_last),
    "images of one pixel, channels last": IMAGES[:, :, :1, :1].contiguous(memory_format=torch.channels_last),
    "a part of each": IMAGES[:, 1],
    "one row for all": torch.randn(1, 3).expand(NUM_SAMPLES, 3),
    "rows without elements": torch.empty(NUM_SAMPLES, 0, 2),
    "conjugates": torch.randn(NUM_SAMPLES, 2, dtype=torch.complex64).conj(),
    "a parameter": torch.nn.Parameter(torch.randn(NUM_SAMPLES, 2)),
    "half precision": torch.randn(NUM_SAMPLES, 3).bfloat16(),
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rows_of_tensors_are_those_that_indexing_takes_with_their_strides(rows: Tensor) -> None:
    fetched = next(next(load(TensorDataset(rows)))[1])
    (found,) = fetched.batch

    expected = rows[torch.tensor(fetched.indices)]
    assert torch.equal(found, expected)
    assert (found.stride(), found.requires_grad, found.is_conj()) == (
        expected.stride(),
        expected.requires_grad,
        expected.is_conj(),
    )


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_global_batch_is_computed_once_and_comes_with_all_its_micro_batches(num_workers: int) -> None:
    order = SampleOrder(num_samples=10, seed=5, global_batch_size=4, micro_batch_size=2, world_size=1)
    sampler = CountedSampler(order=order, start=Position(), total_steps=6, rank=0)
    sampler.made.clear()
    data = TensorDataset(torch.arange(10.0), torch.arange(10))

    loaded = load_global_batches(data, sampler, data=DataSpec(num_workers=num_workers), pin_memory=False)
    seen = [(plan, [fetched.indices for fetched in parts]) for plan, parts in loaded]

    assert sampler.made == [1, 2, 3, 4, 5, 6]
    assert [plan for plan, _ in seen] == list(RankSampler(order=order, start=Position(), total_steps=6, rank=0))
    assert all([one.indices for one in plan.micro_batches] == indices for plan, indices in seen)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_that_raises_stop_iteration_is_not_taken_for_the_end_of_the_batches(num_workers: int) -> None:
    data = TensorDataset(torch.zeros(NUM_SAMPLES))
    order = SampleOrder(num_samples=NUM_SAMPLES, seed=5, global_batch_size=4, micro_batch_size=2, world_size=1)
    walk = RankSampler(order=order, start=Position(), total_steps=2, rank=0)
    how = DataSpec(num_workers=num_workers)
    loaded = load_global_batches(data, walk, data=how, pin_memory=False, collate=lambda _: next(iter(())))

    with pytest.raises(RuntimeError, match="`collate_fn` raised StopIteration"):
        list(next(loaded)[1])


def test_loader_processes_leave_stop_signals_to_their_parent() -> None:
    others = set(psutil.Process().children())
    loaded = load(NoisyImages(NUM_SAMPLES, 0.0), num_workers=2)
    list(next(loaded)[1])
    children = set(psutil.Process().children()) - others
    loaders = [child.pid for child in children if _ignores(child.pid, signal.SIGTERM)]

    for pid in loaders:
        os.kill(pid, signal.SIGTERM)

    assert len(loaders) == 2
    assert len(by_sample(loaded)) == 2 * NUM_SAMPLES - 4


def _ignores(pid: int, number: int) -> bool:
    """Read it from the kernel, as proc(5) describes."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    ignored = next(line for line in lines if line.startswith("SigIgn:"))
    return bool(int(ignored.split()[1], 16) & 1 << (number - 1))


@pytest.mark.long
@pytest.mark.parametrize(("when", "heard"), [("held-back", "told: DataLoader worker"), ("at-once", "not told: ")])
def test_a_loader_that_dies_while_another_is_forked_is_told_of_and_would_not_be_otherwise(
    when: str, heard: str
) -> None:
    argv = [sys.executable, "-m", "tests.unit.loader_dies_amid_fork", when]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.startswith(heard)


class Pair(NamedTuple):
    left: Any
    right: Any


NESTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a tensor": (lambda tensor: tensor, lambda nest: nest),
    "a tuple": (lambda tensor: (tensor, 1), lambda nest: nest[0]),
    "a list": (lambda tensor: ["text", tensor], lambda nest: nest[1]),
    "a dict": (lambda tensor: {"pixels": {"raw": tensor}}, lambda nest: nest["pixels"]["raw"]),
    "a named tuple": (lambda tensor: Pair(None, [tensor]), lambda nest: nest.right[0]),
}


@pytest.mark.parametrize(("wrap", "unwrap"), NESTS.values(), ids=NESTS)
def test_every_tensor_of_a_nest_is_moved(wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]) -> None:
    nest = wrap(torch.zeros(2))

    moved = to_device(nest, torch.device("meta"))

    assert type(moved) is type(nest)
    assert unwrap(moved).device.type == "meta"


def test_images_come_in_channels_last_order_where_asked() -> None:
    images, labels = torch.zeros(2, 3, 4, 4), torch.zeros(2)

    moved, same = to_device((images, labels), torch.device("cpu"), channels_last=True)

    assert moved.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(same, labels)


class Pinnable(Tensor):
    """A tensor that is pinned without a GPU."""

    is_in_pinned_memory = False

    def pin_memory(self, *_: Any) -> Tensor:  # older versions of PyTorch pass a device
        pinned = self.clone()
        pinned.is_in_pinned_memory = True  # type: ignore[attr-defined]
        return pinned


@pytest.mark.parametrize(("wrap", "unwrap"), NESTS.values(), ids=NESTS)
def test_every_tensor_of_a_batch_is_pinned_and_the_indices_of_its_samples_are_passed_on(
    wrap: Callable[[Any], Any], unwrap: Callable[[Any], Any]
) -> None:
    fetched = FetchedBatch(tuple(range(3)), wrap(torch.zeros(2).as_subclass(Pinnable)))

    pinned = pin_memory(fetched)  # as the DataLoader does

    assert pinned.indices is fetched.indices
    assert type(pinned.batch) is type(fetched.batch)
    assert unwrap(pinned.batch).is_in_pinned_memory


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)], layout=torch.jagged),
    ],
    ids=["on a device", "sparse", "of several lengths"],
)
def test_a_tensor_that_cannot_be_pinned_is_passed_on(tensor: Tensor) -> None:
    fetched = FetchedBatch((0,), {"input": tensor})

    assert pin_memory(fetched).batch["input"] is tensor


class OwnBatch:
    def __init__(self) -> None:
        self.is_in_pinned_memory = False

    def pin_memory(self) -> OwnBatch:
        pinned = OwnBatch()
        pinned.is_in_pinned_memory = True
        return pinned


def test_a_batch_of_ones_own_type_pins_itself() -> None:
    assert pin_memory(FetchedBatch((0,), OwnBatch())).batch.is_in_pinned_memory
