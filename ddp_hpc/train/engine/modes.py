"""Sets training and evaluation mode, and keeps modules that the recipe holds in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def set_train_mode_once(model: nn.Module) -> None:
    """Call `model.train()` once before the first step; modules that the recipe put into evaluation mode stay in it."""
    # Many models override `train()` to freeze batch norm, and rely on a training loop that calls it.
    held = [module for module in model.modules() if not module.training]
    if model.training:
        model.train()
    _set_modes(dict.fromkeys(held, False))


@contextmanager
def evaluation_mode(*models: nn.Module) -> Iterator[None]:
    """Put whole models into evaluation mode; put each module back into its own mode afterwards."""
    modes = {module: module.training for model in models for module in model.modules()}
    for model in models:
        model.eval()
    try:
        yield
    finally:
        _set_modes(modes)


def _set_modes(modes: dict[nn.Module, bool]) -> None:
    """Set the modules' modes; parents come before their children."""
    for module, is_training in modes.items():
        if module.training != is_training:
            module.train(is_training)  # a call, not the flag alone: layers such as LoRA's do more in `train()`
    for module, is_training in modes.items():
        vars(module)["training"] = is_training  # a module with two parents was set by both of them
