"""Data that is not a plain list of samples, or does not divide."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.data.loader import SampleError
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.recipe import Recipe
from tests.strange.walks import (
    EPOCHS,
    Case,
    begin,
    close,
    differences,
    everything,
    in_plain_torch,
    sample_ids,
    walk,
    walk_in_parts,
    weights,
)
from tests.unit.made_state import alone

NUM_SAMPLES = 24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def a_recipe(data: Dataset[Any], *, batch_norm: bool = False) -> Recipe:
    more = [nn.BatchNorm1d(4)] if batch_norm else []
    model = nn.Sequential(nn.Linear(3, 4), *more, nn.Tanh(), nn.Linear(4, 2))
    return Recipe(model=model, train_data=data, eval_data=data, loss=nn.CrossEntropyLoss(), optimizer=plain_sgd)


def plain_sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def columns(num_samples: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    values = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(5))
    return values, torch.arange(num_samples) % 2


class Augmenting(TensorDataset):
    """Adds noise to its rows, as many a tutorial does."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        assert isinstance(index, int)
        values, kind = (column[index] for column in self.tensors)
        return values + torch.randn(3), kind


class AugmentingPlainly(Dataset[Any]):
    """The same as data of no type that is known."""

    def __init__(self) -> None:
        self.values, self.kinds = columns()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.values[index] + torch.randn(3), self.kinds[index]


def test_a_tensor_dataset_that_augments_is_called_sample_by_sample_and_seeded(tmp_path: Path) -> None:
    case = Case(recipe=lambda: a_recipe(Augmenting(*columns())))
    plain = Case(recipe=lambda: a_recipe(AugmentingPlainly()))

    unbroken = walk(alone(), case, tmp_path / "unbroken")

    assert differences(unbroken, walk(alone(), plain, tmp_path / "plain")) == []
    assert differences(unbroken, walk_in_parts(alone(), case, tmp_path / "in-parts")) == []


def test_a_last_window_of_one_sample_is_a_step_like_others(tmp_path: Path) -> None:
    case = Case(recipe=lambda: a_recipe(TensorDataset(*columns(NUM_SAMPLES + 1))))

    unbroken = walk(alone(), case, tmp_path / "unbroken")

    batches = sample_ids(tmp_path / "unbroken", 1)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 4, 1] * EPOCHS
    assert differences(weights(unbroken), in_plain_torch(case, batches).state_dict()) == []
    assert differences(unbroken, walk_in_parts(alone(), case, tmp_path / "in-parts")) == []


def test_batch_norm_that_gets_one_sample_is_explained_at_the_start_and_when_it_happens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(recipe=lambda: a_recipe(TensorDataset(*columns(NUM_SAMPLES + 1)), batch_norm=True))

    t = begin(case, alone(), tmp_path / "as-it-is")
    warned = caplog.text
    with pytest.raises(ConfigError, match=r"a single sample .* 1 samples of step 7, .*`data\.drop_last=true`"):
        train(t)
    close(t)

    assert "single sample" in warned
    assert "`data.drop_last=true`" in warned


def test_with_drop_last_batch_norm_never_gets_one_sample(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = TensorDataset(*columns(NUM_SAMPLES + 1))
    case = Case(recipe=lambda: a_recipe(data, batch_norm=True), data={"drop_last": True})

    unbroken = walk(alone(), case, tmp_path / "unbroken")

    batches = sample_ids(tmp_path / "unbroken", 1)
    assert [len(batch) for batch in batches] == [4] * 6 * EPOCHS
    assert differences(weights(unbroken), in_plain_torch(case, batches).state_dict()) == []
    assert "single sample" not in caplog.text


class FailsOnce(AugmentingPlainly):
    """Fails to read one sample, once, wherever it is asked for; a file remembers it."""

    def __init__(self, memory: Path) -> None:
        super().__init__()
        self.memory = memory

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 13 and not self.memory.exists():
            self.memory.touch()
            raise OSError(5, "Input/output error", "part-7.bin")
        return super().__getitem__(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_read_that_fails_names_the_sample_and_the_next_attempt_comes_to_the_same_bits(
    num_workers: int, tmp_path: Path
) -> None:
    keys = {"num_workers": num_workers, "prefetch_factor": 1}
    case = Case(recipe=lambda: replace(a_recipe(FailsOnce(tmp_path / "failed")), eval_data=None), data=keys)
    good = Case(recipe=lambda: replace(a_recipe(AugmentingPlainly()), eval_data=None))

    t = begin(case, alone(), tmp_path / "run")
    with pytest.raises(
        SampleError, match=r"`train_data\[13\]` raised OSError: .*Input/output error: 'part-7.bin'. Check this sample"
    ):
        train(t)
    t.checkpointer.wait()
    close(t)
    t = begin(case, alone(), tmp_path / "run", attempt=1)
    assert train(t)

    assert differences(everything(t), walk(alone(), good, tmp_path / "good")) == []


class Tiny(Dataset[Any]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.ones(3), index % 2


@pytest.mark.long
def test_a_hundred_thousand_tiny_samples_are_each_seen_once(tmp_path: Path) -> None:
    recipe = replace(a_recipe(TensorDataset(*columns())), train_data=Tiny(), eval_data=None)
    case = Case(recipe=lambda: recipe, train={"epochs": 1, "global_batch_size": 5000})

    walk(alone(), case, tmp_path)

    batches = sample_ids(tmp_path, 1)
    assert len(batches) == 20
    assert sorted(index for batch in batches for index in batch) == list(range(100_000))


@pytest.mark.parametrize(("batch", "drop_last"), [(6, False), (10, False), (10, True), (24, True), (2, False)])
def test_a_batch_size_changed_amid_an_epoch_leaves_no_empty_window_and_as_many_epochs_as_asked(
    batch: int, drop_last: bool, tmp_path: Path
) -> None:
    recipe = lambda: a_recipe(TensorDataset(*columns()))  # noqa: E731
    before = Case(recipe=recipe)
    after = Case(recipe=recipe, train={"global_batch_size": batch}, data={"drop_last": drop_last})

    t = begin(before, alone(), tmp_path, stop_at=3)
    assert not train(t)
    close(t)
    used = t.state.position.samples_in_epoch
    t = begin(after, alone(), tmp_path, attempt=1)
    assert train(t)
    close(t)

    sizes = [len(batch) for batch in sample_ids(tmp_path, 1, attempt=1)]
    assert 0 < used < NUM_SAMPLES
    assert 0 not in sizes
    assert (t.state.position.epoch, t.state.position.samples_in_epoch) == (EPOCHS, 0)
    if drop_last:
        assert set(sizes) == {batch}
    else:
        assert sum(sizes) + used == NUM_SAMPLES * EPOCHS


def test_a_finished_run_that_is_extended_writes_the_losses_of_one_that_was_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    case = Case(recipe=lambda: a_recipe(TensorDataset(*columns())), train={"max_steps": 12})

    walk(alone(), replace(case, train={"max_steps": 6}), tmp_path / "extended")
    t = begin(case, alone(), tmp_path / "extended", attempt=1)
    assert train(t)
    close(t)
    walk(alone(), case, tmp_path / "at-once")

    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    losses = [line.partition("loss ")[2].partition(" ")[0] for line in lines]
    steps = [line.partition("/")[0] for line in lines]
    assert steps == ["step 4", "step 6", "step 8", "step 12", "step 4", "step 8", "step 12"]
    assert losses[2:4] == losses[5:]
