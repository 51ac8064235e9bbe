"""Steps after which nothing is due never wait for the device: counted without a GPU, by what the host would read from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.recipe import Recipe
from tests.strange.one_process import prepared

READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"}
MOVES_THAT_WAIT = ("ddp_hpc/", "swa_utils.py")
"""Whose `to(device)` is counted: other parts of PyTorch call it for tensors that are there, or do not wait for the copy."""


class Reads(TorchFunctionMode):
    """Notes calls of tensors' methods for which the host waits."""

    def __init__(self, found: list[str]) -> None:
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, caller = getattr(func, "__name__", ""), sys._getframe(1)
        is_move = name == "to" and any(isinstance(one, torch.device | str) for one in args[1:])
        if name in READS or (is_move and any(part in caller.f_code.co_filename for part in MOVES_THAT_WAIT)):
            self.found.append(f"{name} in {caller.f_code.co_filename}:{caller.f_lineno}")
        return func(*args, **(kwargs or {}))


class Scalars(TorchDispatchMode):
    """Notes scalars that PyTorch's own code reads."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def reads_in(training: Training, steps: range) -> list[str]:
    """Train, and return what the host reads in `steps`, from the forward to the end of the update."""
    found: list[str] = []
    modes: list[Any] = []
    inner = training.guard.keep_values

    def begin(*_: Any) -> None:
        if training.state.position.step + 1 in steps and not modes:
            modes.extend([Reads(found), Scalars(found)])
            for mode in modes:
                mode.__enter__()

    def end(*_: Any) -> None:
        for mode in reversed(modes):
            mode.__exit__(None, None, None)
        modes.clear()

    if training.guard.is_active:
        training.guard.keep_values = lambda: (begin(), inner())[1]  # type: ignore[method-assign,func-returns-value]
    else:
        training.state.model.register_forward_pre_hook(begin)
    enter = training.phases.enter

    def entered(phase: str) -> None:
        if phase in {"data", "other"}:  # the batch is waited for, or the step is over
            end()
        enter(phase)

    training.phases.enter = entered  # type: ignore[method-assign]
    try:
        train(training)
    finally:
        end()
        training.recorder.close()
    return found


def fused(kind: str, **options: Any) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    return lambda model, lr: getattr(torch.optim, kind)(model.parameters(), lr=lr, fused=True, **options)


SGD, ADAMW = fused("SGD", momentum=0.9), fused("AdamW")


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"train__grad_clip_norm": 1.0},
        {"train__ema_decay": 0.9},
        {"train__on_nonfinite": "skip"},
        {"train__precision": "fp16"},
        {"train__precision": "fp16", "train__grad_clip_norm": 1.0, "train__ema_decay": 0.9},
        {"train__on_nonfinite": "skip", "train__grad_clip_norm": 1.0, "train__ema_decay": 0.9},
    ],
    ids=["plain", "clip", "ema", "skip", "fp16", "fp16-clip-ema", "skip-clip-ema"],
)
def test_a_step_after_which_nothing_is_due_reads_nothing_from_the_device(
    keys: dict[str, Any], optimizer: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    recipe = Recipe(
        model=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        train_data=TensorDataset(torch.randn(400, 3), torch.randn(400, 1)),
        loss=mean_square,
        optimizer=optimizer,
    )
    training = prepared(tmp_path / "run", recipe, log__every_steps=50, train__max_steps=12, **keys)
    training.stop_consensus.next_step = 50

    assert reads_in(training, range(3, 9)) == []


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def test_the_count_sees_a_recipe_that_reads(tmp_path: Path) -> None:
    def reading(outputs: Tensor, targets: Tensor) -> Tensor:
        loss = mean_square(outputs, targets)
        return loss if loss.item() < float("inf") else loss * 2

    recipe = Recipe(
        model=nn.Linear(3, 1), train_data=TensorDataset(torch.randn(400, 3), torch.randn(400, 1)), loss=reading
    )
    training = prepared(tmp_path / "run", recipe, log__every_steps=50, train__max_steps=12)
    training.stop_consensus.next_step = 50

    found = reads_in(training, range(3, 9))

    assert any("item in" in one for one in found)
