"""A rank that computes wrongly before the all-reduce is found and named; nothing of the training changes where all compute the same."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.recomputation import Recomputation
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state.rng import seed_host_libraries
from tests.distributed.bit_flips import alone
from tests.distributed.processes import in_group
from tests.distributed.wrong_processors import EVERY, Fault, Outcome, recipe, try_faults
from tests.strange.walks import Case, begin, differences, everything

FAULTS = [
    Fault(kind="a product", rank=1, after=12),
    Fault(kind="a stuck bit", rank=0, after=21, bit=22),
    Fault(kind="large values", rank=1, after=31),
]


def outcomes(world_size: int, folder: Path, faults: list[Fault]) -> list[Outcome]:
    by_rank = in_group(world_size, partial(try_faults, path=folder / "runs", faults=faults), folder / "ranks")
    assert all(one == by_rank[0] for one in by_rank), "the ranks do not tell the same story"
    return by_rank[0]


@pytest.mark.parametrize(
    ("world_size", "faults"),
    [
        (3, FAULTS[1:2]),
        *(pytest.param(world_size, FAULTS, marks=pytest.mark.long) for world_size in (2, 3, 4)),
    ],
)
def test_a_rank_that_computes_wrongly_is_found_named_if_clear_and_the_run_ends_with_the_same_bits(
    tmp_path: Path, world_size: int, faults: list[Fault]
) -> None:
    for one in outcomes(world_size, tmp_path, faults):
        assert (one.end, one.is_same) == ("ranks differ", True)
        assert one.found_at is not None
        assert 0 < one.found_at - one.fault.after <= EVERY
        assert (one.told_by, one.named) == (("vote", (one.fault.rank,)) if world_size > 2 else ("", ()))


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_is_wrong_now_and_then_is_named_where_it_differs_from_itself(
    tmp_path: Path, world_size: int
) -> None:
    found = [
        one
        for one in outcomes(world_size, tmp_path, [Fault(kind="one call in four", rank=1, after=2)] * 4)
        if one.end == "ranks differ"
    ]

    assert found, "nothing was wrong in any comparison"
    for one in found:
        assert one.named == (1,) or (one.told_by == "" and world_size == 2)


# --- what is as it was without it ------------------------------------------------------------------------------------


@dataclass
class Sample:
    """A batch of a class of the user's, as some libraries make them."""

    rows: torch.Tensor
    more: dict[str, object]


class Restless(nn.Module):
    """Counts its calls, draws from generators of its own, keeps history, and changes its inputs and buffers."""

    steps_seen: torch.Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("steps_seen", torch.zeros(1))
        self.num_calls = 0
        self.history: deque[float] = deque(maxlen=3)
        self.settings = {"noise": [0.1]}
        self.own = torch.Generator().manual_seed(rank)
        self.numpys = np.random.default_rng(rank)
        self.pythons = random.Random(rank)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.steps_seen += 1
        self.settings["noise"][0] *= 0.99
        noise = torch.randn(rows.shape, generator=self.own) * self.settings["noise"][0]
        rows += noise * self.numpys.random() * self.pythons.random()
        self.history.append(float(rows.mean()))
        hidden = nn.functional.dropout(self.norm(self.first(rows)).relu(), 0.3, self.training)
        return self.last(hidden) * (1 + sum(self.history) * np.random.rand() * random.random() / self.num_calls)  # type: ignore[no-any-return]  # noqa: NPY002


class CountingLoss:
    """A loss with a state."""

    def __init__(self) -> None:
        self.smooth = 0.0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        self.smooth = 0.9 * self.smooth + 0.1 * float(loss.detach())
        return loss * (1 + self.smooth)


def split(batch: Sample) -> tuple[torch.Tensor, object]:
    return batch.rows, batch.more.pop("targets")


def restless(rank: int, counts: list[int]) -> Recipe:
    rows = torch.randn(92, 6, generator=torch.Generator().manual_seed(2))
    model = Restless(rank)
    model.first.weight.register_hook(lambda _: counts.append(1))

    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Sample:
        rows, targets = zip(*samples, strict=True)
        return Sample(torch.stack(rows), {"targets": torch.stack(targets), "kind": "train", "size": (len(rows), None)})

    return Recipe(
        model=model,
        train_data=TensorDataset(rows, rows[:, :4].argmax(1)),
        collate_fn=collate,
        inputs_and_targets=split,
        loss=CountingLoss(),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
    )


def walk_of(case: Case, group: Group, path: Path, counts: list[int]) -> tuple[dict[str, Any], Training]:
    seed_host_libraries(7)
    t = begin(replace(case, recipe=lambda: restless(group.rank_info.rank, counts)), group, path)
    assert train(t)
    return everything(t), t


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("fp16", marks=pytest.mark.long), pytest.param("bf16", marks=pytest.mark.long)]
)
def test_recomputing_changes_nothing_of_a_training(tmp_path: Path, precision: str) -> None:
    """With dropout, batch norm, accumulation, an uneven last batch, an average, generators and counters of the model's and the loss's own."""
    plain = Case(
        recipe=recipe,
        train={
            "epochs": 2,
            "global_batch_size": 16,
            "micro_batch_size": 4,
            "ema_decay": 0.9,
            "find_unused_parameters": True,
            "precision": precision,
        },
    )

    def walk(group: Group) -> None:
        found = []
        for number, every in enumerate((None, 1)):
            counts: list[int] = []
            state, t = walk_of(
                replace(plain, recompute_every=every), alone(group, number), tmp_path / f"run-{number}", counts
            )
            model = t.state.model
            assert isinstance(model, Restless)
            if every:
                assert isinstance(t.replicas, Recomputation)
                assert t.replicas.num_equal == t.total_steps
            drawn = (
                torch.rand(1).item(),
                model.numpys.random(),
                model.pythons.random(),
                torch.rand(1, generator=model.own).item(),
            )
            found.append((state, sum(counts), model.num_calls, [*model.history], t.recipe.loss.smooth, drawn))  # type: ignore[attr-defined]
        assert not differences(found[0][0], found[1][0])
        assert found[0][1:] == found[1][1:]

    in_group(2, walk, tmp_path / "ranks")


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_thousand_comparisons_of_ranks_that_are_right_find_no_difference(tmp_path: Path, world_size: int) -> None:
    case = Case(
        recipe=recipe,
        train={
            "epochs": 500,
            "find_unused_parameters": True,
            "max_steps": 1000,
            "global_batch_size": 16,
            "micro_batch_size": 2,
            "precision": "fp16",
            "record_samples": False,
        },
        data={"drop_last": True},
        save_every=500,
        log_every=500,
        recompute_every=1,
    )

    def walk(group: Group) -> int:
        _, t = walk_of(case, group, tmp_path / "run", [])
        assert isinstance(t.replicas, Recomputation)
        return t.replicas.num_equal

    assert in_group(world_size, walk, tmp_path / "ranks") == [1000] * world_size
