"""Trainings of a small model on ranks of which one computes wrongly from some step on, before the all-reduce, and what becomes of them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.errors import RanksDifferError
from ddp_hpc.run_dir.differences import read_difference
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.distributed import bit_flips
from tests.distributed.bit_flips import LAST, Sums, alone
from tests.strange.walks import begin, close, differences, everything

Kind = Literal["a product", "a stuck bit", "large values", "one call in four"]
KINDS: dict[Kind, str] = {
    "a product": "the matrix product of one layer has a wrong bit in one element, in the forward pass",
    "a stuck bit": "a bit is always set in one element of a layer's gradient",
    "large values": "the lowest bits of results above a limit are lost, in the backward pass",
    "one call in four": "a bit of the layer's gradient is wrong in one call of four, by chance",
}
EVERY = 5
"""Steps from one recomputation to the next."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What one rank computes wrongly in all steps after some step."""

    kind: Kind
    rank: int
    after: int
    """The last step that is right."""
    place: int = 100
    bit: int = 20


class _Processor:
    """What this rank computes on."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.step = 0
        self.chance = random.Random()

    def worked(self, numbers: Tensor, where: Literal["product", "gradient"]) -> Tensor:
        """Return numbers as this processor gets them."""
        fault = self.fault
        if fault is None or self.step < fault.after:
            return numbers
        found = numbers.contiguous().clone()
        words = found.view(-1).view(torch.int32)
        place = fault.place % words.numel()
        if fault.kind == "a product" and where == "product":
            words[place] ^= 1 << fault.bit
        elif fault.kind == "a stuck bit" and where == "gradient":
            words[place] |= 1 << fault.bit
        elif fault.kind == "large values" and where == "gradient":
            words[found.view(-1).abs() > found.abs().mean()] &= ~0xFF
        elif fault.kind == "one call in four" and where == "gradient" and self.chance.random() < 0.25:
            words[place] ^= 1 << fault.bit
        return found


PROCESSOR = _Processor()
"""Of this rank: not a part of the model, so nothing of it is put back."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return PROCESSOR.worked(rows @ weight.T, "product")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight = ctx.saved_tensors
        return gradient @ weight, PROCESSOR.worked(gradient.T @ rows, "gradient")


class OnProcessor(nn.Linear):
    """A layer that computes on `PROCESSOR`."""

    def forward(self, rows: Tensor) -> Tensor:
        return _Product.apply(rows, self.weight) + self.bias  # type: ignore[no-any-return]  # a Tensor


def recipe() -> Recipe:
    plain = bit_flips.recipe()
    model = Sums()
    model.layers[0] = OnProcessor(12, 32)
    return replace(plain, model=model)


CASE = replace(bit_flips.CASE, recipe=recipe, recompute_every=EVERY)


def random_fault(chosen: random.Random, *, world_size: int, kind: Kind) -> Fault:
    return Fault(
        kind=kind,
        rank=chosen.randrange(world_size),
        after=chosen.randint(1, LAST - EVERY - 1),
        place=chosen.randrange(32 * 12),
        bit=chosen.randrange(31),
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a training on a wrong processor, as one rank saw it."""

    fault: Fault
    world_size: int
    end: Literal["finished", "ranks differ"]
    found_at: int | None
    told_by: str
    named: tuple[int, ...]
    is_same: bool
    """Whether the run ended with the bits of one on right processors: in this attempt, or without that node in the next."""


def _attempted(group: Group, path: Path, fault: Fault | None, attempt: int) -> dict[str, Any] | None:
    """Train to the end; return what the state holds, or None if the ranks differ."""
    t = begin(CASE, group, path, attempt=attempt)
    PROCESSOR.fault = fault if fault is not None and group.rank_info.rank == fault.rank else None
    PROCESSOR.step = 0

    def count(*_: object) -> None:
        PROCESSOR.step += 1

    t.state.optimizer.register_step_post_hook(count)
    try:
        assert train(t)
    except RanksDifferError:
        close(t)
        return None
    return everything(t)


def try_fault(group: Group, path: Path, fault: Fault, unbroken: dict[str, Any], number: int) -> Outcome:
    """Train with a fault, and if it is found, go on from the newest checkpoint without it, as on another node."""
    own = alone(group, number)
    state = _attempted(own, path, fault, 0)
    is_found = state is None
    if state is None:
        state = _attempted(own, path, None, 1)
    dist.barrier()
    found = read_difference(RunDir(path), 0)
    dist.barrier()
    if group.rank_info.is_rank_zero:
        shutil.rmtree(path)
    return Outcome(
        fault=fault,
        world_size=group.rank_info.world_size,
        end="ranks differ" if is_found else "finished",
        found_at=found.step if found else None,
        told_by=found.told_by if found else "",
        named=found.odd_ranks if found else (),
        is_same=state is not None and not differences(state, unbroken),
    )


def try_faults(group: Group, path: Path, faults: Sequence[Fault]) -> list[Outcome]:
    """Train once on right processors, then with each of the faults."""
    unbroken = _attempted(alone(group, 0), path / "unbroken", None, 0)
    assert unbroken is not None
    return [try_fault(group, path / f"fault-{n}", fault, unbroken, n) for n, fault in enumerate(faults, 1)]


ALL_KINDS: Sequence[Kind] = get_args(Kind)
