"""Models whose forward changes more than buffers: neither the trial evaluation nor the pass before the first step leaves a trace."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.train.engine import set_aside
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.process_group import Group
from tests.distributed.processes import in_group
from tests.strange.test_models import WIDTH, a_recipe
from tests.strange.walks import (
    Case,
    begin,
    differences,
    everything,
    in_plain_torch,
    sample_ids,
    walk,
    walk_in_parts,
    weights,
)
from tests.unit.made_state import alone


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def over_ranks(value: Tensor) -> Tensor:
    """Return the mean over all ranks."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


class Moving(nn.Module):
    """Layers that change something before they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))

    @torch.no_grad()
    def move(self, inputs: Tensor) -> None:
        raise NotImplementedError

    def computed(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]  # a Tensor

    def forward(self, inputs: Tensor) -> Tensor:
        self.move(inputs)
        return self.computed(inputs)


class Teacher(Moving):
    """A copy of the layers without gradients that follows them, as in MoCo, BYOL, DINO and mean teachers."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def move(self, inputs: Tensor) -> None:
        for own, followed in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            if self.training:
                own.data.mul_(0.9).add_(followed, alpha=0.1)

    def computed(self, inputs: Tensor) -> Tensor:
        return super().computed(inputs) + 0.3 * self.teacher(inputs).detach()  # type: ignore[no-any-return]  # a Tensor


class Codebook(Moving):
    """Codes, parameters without gradients, that move towards the inputs which are nearest to them."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)

    @torch.no_grad()
    def move(self, inputs: Tensor) -> None:
        if self.training:
            nearest = nn.functional.one_hot(torch.cdist(inputs, self.codes).argmin(1), 4).to(inputs)
            self.codes.add_(0.1 * over_ranks(nearest.T @ inputs - nearest.sum(0)[:, None] * self.codes))

    def computed(self, inputs: Tensor) -> Tensor:
        return super().computed(inputs + 0.1 * self.codes[torch.cdist(inputs, self.codes).argmin(1)])


class Counting(Moving):
    """A number of calls that the state_dict saves, though it is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    @torch.no_grad()
    def move(self, inputs: Tensor) -> None:
        self.calls += self.training

    def computed(self, inputs: Tensor) -> Tensor:
        return super().computed(inputs) * (1 + 1 / (1 + self.calls))

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)


class SetByFirstBatch(Counting):
    """A scale that the first batch sets, as in ActNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    @torch.no_grad()
    def move(self, inputs: Tensor) -> None:
        if not self.calls:
            self.scale.copy_(over_ranks(inputs.abs().mean(0)))
            self.calls = 1

    def computed(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs * self.scale)  # type: ignore[no-any-return]  # a Tensor


MODELS: list[Callable[[], nn.Module]] = [Teacher, Codebook, Counting, SetByFirstBatch]


def _walk_both_ways(group: Group, case: Case, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return walk(group, case, folder / "unbroken"), walk_in_parts(group, case, folder / "in-parts")


@pytest.mark.parametrize("model", MODELS)
def test_it_is_trained_as_by_a_plain_loop_although_it_was_tried_out(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    case = Case(recipe=lambda: a_recipe(model()), train={"epochs": 1})

    trained = walk(alone(), case, tmp_path / "run")

    plain = in_plain_torch(case, sample_ids(tmp_path / "run", 1)).state_dict()
    assert differences(weights(trained), plain) == []


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_on_two_ranks_a_resumed_training_ends_with_the_bits_of_an_unbroken_one(
    model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    case = Case(recipe=lambda: a_recipe(model(), eval_data=None))

    ranks = in_group(2, partial(_walk_both_ways, case=case, folder=tmp_path), tmp_path / "ours")

    plain = in_plain_torch(case, sample_ids(tmp_path / "unbroken", 2)).state_dict()
    for unbroken, in_parts in ranks:
        assert differences(unbroken, in_parts) == []
        if model is not Codebook:  # whose codes are means over halves of a batch
            torch.testing.assert_close(weights(unbroken), dict(plain))


class Iterating(Moving):
    """Takes one number after the other from an iterator, of which nobody can make a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def move(self, inputs: Tensor) -> None:
        next(self.numbers)


@pytest.mark.parametrize(("model", "told"), [(Iterating, ["`model.numbers` is of the type count"]), (Teacher, [])])
def test_what_cannot_be_put_back_is_named_once_and_an_ordinary_model_is_not(
    model: Callable[[], nn.Module], told: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_aside._say_once.cache_clear()

    def said(group: Group) -> list[str]:
        t = begin(Case(recipe=lambda: a_recipe(model()), train={"epochs": 1}), group, tmp_path / "run")
        with caplog.at_level(logging.WARNING):
            assert train(t)
        everything(t)
        return [one.getMessage() for one in caplog.records if "cannot put back" in one.getMessage()]

    for found in in_group(2, said, tmp_path / "ranks"):
        assert len(found) == len(told)
        assert all(name in line for name, line in zip(told, found, strict=True))
