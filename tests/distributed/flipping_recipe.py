"""The trial recipe on processors that now and then get a bit wrong: hooks of the optimizer flip it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_hpc.train.recipe import Recipe

Flip = Sequence[Any]
"""Step, rank, where (`gradient`, `weight`, `moment`), and whether it happens `once` in the run or `always`."""


def build(flips: Sequence[Flip] = (), folder: str = "", **more: Any) -> Recipe:
    """Return the trial recipe, with these bit flips; `folder` remembers those that have happened."""
    recipe: Recipe = import_module("trial_recipe").build(**more)

    def optimizer(model: torch.nn.Module, lr: float) -> Optimizer:
        made = torch.optim.AdamW(model.parameters(), lr=lr)
        made.register_step_pre_hook(lambda *_: _flip(made, flips, Path(folder), before=True))
        made.register_step_post_hook(lambda *_: _flip(made, flips, Path(folder), before=False))
        return made

    return replace(recipe, optimizer=optimizer)


def _flip(optimizer: Optimizer, flips: Sequence[Flip], folder: Path, *, before: bool) -> None:
    first = optimizer.param_groups[0]["params"][0]
    state = optimizer.state[first]
    step = int(state["step"]) if "step" in state else 0
    for number, (at, rank, where, how) in enumerate(flips):
        if (before, step) != (where == "gradient", at - (where == "gradient")) or rank != dist.get_rank():
            continue
        done = folder / f"flip-{number}"
        if how == "once" and done.exists():
            continue
        done.touch()
        flip_bit({"gradient": first.grad, "weight": first, "moment": state.get("exp_avg")}[where], place=3, bit=20)


@torch.no_grad()
def flip_bit(tensor: Tensor | None, *, place: int, bit: int) -> None:
    """Flip a bit of a contiguous tensor of 32-bit numbers."""
    assert tensor is not None
    tensor.view(-1).view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
