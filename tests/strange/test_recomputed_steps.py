"""Models and batches of which a step is not easily computed again: the training goes on, or ends with a word, and never hangs."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from ddp_hpc.errors import RanksDifferError
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.recomputation import Recomputation
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.distributed.bit_flips import alone
from tests.distributed.processes import in_group
from tests.strange.walks import Case, begin, close, differences, everything

SECRET = random.Random()
"""Outside of any model, so nothing puts it back."""
CALLS: list[int] = []
"""Of `forward`, on this rank: the warm-up, then each step is followed by a recomputation."""
FIRST_RECOMPUTED = 3


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(rows).relu())  # type: ignore[no-any-return]  # a Tensor


class Checkpointed(Layers):
    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.first, rows.requires_grad_(), use_reentrant=self.is_reentrant)
        return self.last(hidden.relu())  # type: ignore[no-any-return]  # a Tensor


class Contrastive(Layers):
    """Gathers the rows of all ranks, and scores its own by what rank it is."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        own = super().forward(rows)
        all_rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(all_rows, own.detach().contiguous())
        return own - torch.cat(all_rows).mean(0)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.words((rows.abs() * 10).long().clamp(max=49)))  # type: ignore[no-any-return]  # a Tensor


class Irregular(Layers):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * (1 + SECRET.random() / 1000)


class ByRank(Layers):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) * (1 + dist.get_rank() / 1000)


class Held:
    """An object of the user's, which is no module."""

    def __init__(self) -> None:
        self.calls = 0
        self.average = torch.zeros(1)


class Counting(Layers):
    """Keeps its state in an object, and a buffer that is None in every second pass."""

    maybe: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()
        self.register_buffer("maybe", None, persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.held.calls += 1
        self.held.average += 0.1
        self.maybe = torch.ones(1) if self.maybe is None else None
        return super().forward(rows) * (self.held.average / self.held.calls**2 + (self.maybe is None))


class Iterating(Layers):
    """Takes one number after the other from an iterator, which nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows) / next(self.numbers)


class Hiding(Layers):
    """Holds a layer that PyTorch does not know of, with averages of this rank's own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (nn.BatchNorm1d(4, affine=False),)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(self.hidden[0](rows)) + self.hidden[0].running_mean.sum()  # type: ignore[union-attr]  # a Tensor


class Failing(Layers):
    """Raises on rank 1 when it computes outside of a step."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        if dist.get_rank() == 1 and len(CALLS) == FIRST_RECOMPUTED:
            raise MemoryError("no memory left")
        return super().forward(rows)


class FailingTogether(Failing):
    """The same, while the others wait for it."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = super().forward(rows)
        dist.all_reduce(torch.zeros(1000))
        return found


def recipe(model: Callable[[], nn.Module], **more: Any) -> Recipe:
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(3))
    made: dict[str, Any] = {
        "model": model(),
        "train_data": TensorDataset(rows, rows[:, :2]),
        "loss": nn.MSELoss(),
        "optimizer": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
    }
    return Recipe(**(made | more))


def case(model: Callable[[], nn.Module], **more: Any) -> Case:
    return Case(recipe=partial(recipe, model, **more), train={"epochs": 1}, recompute_every=1)


def walked(group: Group, asked: Case, path: Path) -> tuple[Recomputation, dict[str, Any]]:
    t = begin(asked, group, path)
    assert isinstance(t.replicas, Recomputation)
    assert train(t)
    return t.replicas, everything(t)


GOES_ON: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "nothing odd": (Layers, {}, ""),
    "a checkpoint in the forward": (partial(Checkpointed, is_reentrant=False), {}, ""),
    "a reentrant one": (partial(Checkpointed, is_reentrant=True), {}, ""),
    "collectives in the forward": (Contrastive, {}, ""),
    "sparse gradients": (Words, {}, ""),
    "state in an object, and a buffer that comes and goes": (Counting, {}, ""),
    "an iterator": (Iterating, {}, "`model.numbers` is of the type count"),
    "a layer that is not registered": (Hiding, {}, "`model.hidden[0]` is a module of the type BatchNorm1d that is not"),
    "not deterministic": (Irregular, {}, "several ranks do not find the same"),
    "an error outside of steps": (Failing, {}, "rank 1 could not compute its micro batch"),
}


@pytest.mark.long
@pytest.mark.parametrize(("model", "more", "told"), GOES_ON.values(), ids=GOES_ON)
def test_a_training_goes_on_as_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: Callable[[], nn.Module], more: dict[str, Any], told: str
) -> None:
    asked = case(model, **more)

    def walk(group: Group) -> tuple[str, int, list[str]]:
        SECRET.seed(group.rank_info.rank)
        with caplog.at_level(logging.WARNING):
            replicas, state = walked(group, asked, tmp_path / "run")
        said = caplog.text
        CALLS.clear()
        SECRET.seed(group.rank_info.rank)
        plain = begin(replace(asked, recompute_every=None), alone(group, 1), tmp_path / "plain")
        CALLS.extend([1] * 1000)
        assert train(plain)
        is_seeded = model is not Irregular  # which draws once more for each recomputation
        assert replicas._computed.goes_backward == ("reentrant" in repr(model) and "True" in repr(model))
        return said, replicas.num_equal, differences(state, everything(plain)) if is_seeded else []

    for said, num_equal, differs in in_group(2, walk, tmp_path / "ranks"):
        assert differs == []
        assert (told in said) if told else ("no longer compare" not in said)
        assert num_equal == (0 if told else 10)


@pytest.mark.long
def test_ranks_that_wait_in_a_collective_for_one_that_raised_end_with_it(tmp_path: Path) -> None:
    def walk(group: Group) -> str:
        t = begin(case(FailingTogether), group, tmp_path / "run")
        assert isinstance(t.replicas, Recomputation)
        t.replicas._computed = replace(t.replicas._computed, patience_s=1.0)
        with pytest.raises((MemoryError, RuntimeError)) as raised:
            train(t)
        close(t)
        if group.rank_info.rank == 1:
            dist.destroy_process_group()  # as the end of its process does
        return type(raised.value).__name__

    assert in_group(2, walk, tmp_path / "ranks")[1] == "MemoryError"


@pytest.mark.long
def test_code_that_does_not_do_the_same_on_each_rank_is_told_as_that(tmp_path: Path) -> None:
    def walk(group: Group) -> str:
        t = begin(case(ByRank), group, tmp_path / "run")
        with pytest.raises(RanksDifferError, match=r"integrity\.recompute_every_steps=null") as raised:
            train(t)
        close(t)
        return str(raised.value)

    assert len(set(in_group(2, walk, tmp_path / "ranks"))) == 1


def with_a_set(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    rows, targets = zip(*samples, strict=True)
    return {"rows": torch.stack(rows), "targets": torch.stack(targets), "tags": {"a", "b"}}


@pytest.mark.long
def test_a_batch_that_cannot_be_sent_is_named_and_the_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    more: dict[str, Any] = {
        "collate_fn": with_a_set,
        "inputs_and_targets": lambda batch: (batch["rows"], batch["targets"]),
    }

    def walk(group: Group) -> str:
        walked(group, case(Layers, **more), tmp_path / "run")
        return caplog.text

    for said in in_group(2, walk, tmp_path / "ranks"):
        assert "cannot send its micro batch: the batch['tags'] is of the type set" in said
        assert said.count("no longer compare") == 1


@pytest.mark.long
def test_ranks_with_other_numbers_of_threads_are_not_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def walk(group: Group) -> str:
        t = begin(case(Layers), group, tmp_path / "run")
        assert isinstance(t.replicas, Recomputation)
        t.replicas._computed.num_threads = 1 + group.rank_info.rank
        assert train(t)
        close(t)
        return caplog.text

    for said in in_group(2, walk, tmp_path / "ranks"):
        assert "several kinds of processors, which may round differently" in said
