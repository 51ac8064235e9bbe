"""Trainings of a small model in which one rank gets one bit wrong, and what becomes of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_hpc.base.errors import DivergedError, RanksDifferError
from ddp_hpc.run.run_dir.differences import read_difference
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import AttemptInputs, write_inputs
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.sealed_store import SealedStore
from tests.strange.walks import Case, begin, close, differences, everything

Where = Literal["weight", "moment", "gradient", "local gradient"]
"""`gradient`: after the all-reduce, so on one rank alone; `local gradient`: before it, so all ranks get what follows from it."""
EVERY = 10
"""Steps from one comparison to the next."""
LAST = 40
STEPS_A_SAVE = 10


class Sums(nn.Module):
    """Two layers, and one that no gradient reaches in some samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows) * self.scale  # type: ignore[no-any-return]  # a Tensor


def recipe() -> Recipe:
    rows = torch.randn(LAST * 12, 12, generator=torch.Generator().manual_seed(5))
    return Recipe(
        model=Sums(),
        train_data=TensorDataset(rows, rows[:, :4].argmax(1)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr),
    )


CASE = Case(
    recipe=recipe,
    train={"epochs": 1, "global_batch_size": 12, "lr": 3e-3},
    save_every=STEPS_A_SAVE,
    compare_every=EVERY,
)


def squares() -> Recipe:
    """The same by plain gradient descent on squares, where a wrong exponent soon leads to a loss that is not finite."""
    plain = recipe()
    rows = plain.train_data.tensors[0]  # type: ignore[attr-defined]  # a TensorDataset
    return replace(
        plain,
        train_data=TensorDataset(rows, rows[:, :4] + rows[:, 4:8]),
        loss=nn.MSELoss(),
        optimizer=lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
    )


BEFORE_A_COMPARISON = replace(CASE, recipe=squares, compare_every=100, save_every=20)
"""Ranks are compared where they save, which is long after a loss is not finite."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit of one element, wrong on one rank after a step (a gradient: in that step)."""

    step: int
    rank: int
    where: Where
    place: int
    """Which of all elements of all tensors of this kind, as in one row."""
    bit: int
    num_alike: int = 1
    """On how many ranks, the first of which is `rank`."""

    def ranks(self, world_size: int) -> tuple[int, ...]:
        return tuple(sorted((self.rank + more) % world_size for more in range(self.num_alike)))


def random_flip(chosen: random.Random, *, world_size: int, where: Where) -> Flip:
    num = sum(one.numel() for one in Sums().parameters())
    return Flip(
        step=chosen.randint(1, LAST - 1),
        rank=chosen.randrange(world_size),
        where=where,
        place=chosen.randrange(num * (2 if where == "moment" else 1)),
        bit=chosen.randrange(32),
    )


@dataclass
class _Step:
    number: int = 0


def arm(t: Training, flip: Flip) -> None:
    """Have this rank's bit flip when its step comes."""
    if t.group.rank_info.rank not in flip.ranks(t.group.rank_info.world_size):
        return
    optimizer, step = t.state.optimizer, _Step(t.state.position.step)
    parameters = [one for group in optimizer.param_groups for one in group["params"]]

    def before(*_: Any) -> None:
        step.number += 1
        if step.number == flip.step and flip.where == "gradient":
            flip_bit([one.grad for one in parameters], flip)

    def after(*_: Any) -> None:
        if step.number == flip.step and flip.where == "weight":
            flip_bit(parameters, flip)
        if step.number == flip.step and flip.where == "moment":
            flip_bit([optimizer.state[one][key] for one in parameters for key in ("exp_avg", "exp_avg_sq")], flip)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    if flip.where == "local gradient":
        begin = 0
        for parameter in parameters:
            if begin <= flip.place < begin + parameter.numel():
                parameter.register_hook(lambda gradient, begin=begin: _flipped(gradient, flip, step, begin))
            begin += parameter.numel()


def _flipped(gradient: Tensor, flip: Flip, step: _Step, begin: int) -> Tensor:
    if step.number + 1 != flip.step:
        return gradient
    changed = gradient.clone()
    flip_bit([changed], Flip(**{**asdict(flip), "place": flip.place - begin}))
    return changed


@torch.no_grad()
def flip_bit(tensors: Sequence[Any], flip: Flip) -> None:
    """Flip the bit, in 32-bit numbers."""
    place = flip.place
    for tensor in tensors:
        if place < tensor.numel():
            tensor.view(-1).view(torch.int32)[place] ^= (1 << flip.bit) - (1 << 32 if flip.bit == 31 else 0)
            return
        place -= tensor.numel()
    raise IndexError(flip)


def alone(group: Group, number: int) -> Group:
    """Return the group with stores of a run's own."""
    stores = [
        SealedStore(dist.PrefixStore(f"run-{number}", sealed._store), "") for sealed in (group.store, group.side_store)
    ]
    return Group(group.rank_info, group.device, *stores)


End = Literal["finished", "ranks differ", "diverged"]


def attempted(
    group: Group, path: Path, *, attempt: int, flip: Flip | None = None, case: Case = CASE
) -> tuple[End, dict[str, Any]]:
    """Train to the end, or to the error that all ranks agree on; return which, and all that the state holds."""
    t = begin(case, group, path, attempt=attempt)
    if group.rank_info.is_rank_zero:
        write_inputs(t.run, AttemptInputs(attempt=attempt, world_size=t.state.world_size, config=""))
    restored, plan = t.update_total_steps, flip

    def armed() -> None:  # once the step at which this attempt begins is known
        restored()
        if plan is not None:
            arm(t, plan)

    t.update_total_steps = armed  # type: ignore[method-assign]
    try:
        assert train(t)
    except RanksDifferError:
        close(t)
        return "ranks differ", {}
    except DivergedError:
        close(t)
        return "diverged", {}
    return "finished", everything(t)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a training with a flipped bit, as one rank saw it."""

    flip: Flip
    world_size: int
    end: End
    """Of the attempt in which the bit flipped."""
    found_at: int | None
    """The step after which the ranks were compared and differed."""
    told_by: str
    named: tuple[int, ...]
    end_after: End
    """Of the attempt after it."""
    is_same: bool
    """Whether the run ended with the bits of one that nothing disturbed."""


def try_flip(
    group: Group, path: Path, flip: Flip, unbroken: dict[str, Any], *, number: int, case: Case = CASE
) -> Outcome:
    """Train with a flipped bit, and once more from the newest checkpoint if the ranks differ."""
    own = alone(group, number)
    end, state = attempted(own, path, attempt=0, flip=flip, case=case)
    end_after = end
    if end == "ranks differ":
        end_after, state = attempted(own, path, attempt=1, case=case)
    dist.barrier()
    found = read_difference(RunDir(path), 0)
    dist.barrier()
    if group.rank_info.is_rank_zero:
        shutil.rmtree(path)
    return Outcome(
        flip=flip,
        world_size=group.rank_info.world_size,
        end=end,
        found_at=found.step if found else None,
        told_by=found.told_by if found else "",
        named=found.odd_ranks if found else (),
        end_after=end_after,
        is_same=end_after == "finished" and not differences(state, unbroken),
    )


def try_flips(group: Group, path: Path, flips: Sequence[Flip], case: Case = CASE) -> list[Outcome]:
    """Train once undisturbed, then with each of the flips."""
    end, unbroken = attempted(alone(group, 0), path / "unbroken", attempt=0, case=case)
    assert end == "finished"
    return [
        try_flip(group, path / f"flip-{number}", flip, unbroken, number=number, case=case)
        for number, flip in enumerate(flips, 1)
    ]
