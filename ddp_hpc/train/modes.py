"""Which modules of a model are in training mode, and which are held in evaluation mode, as the recipe left them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def settle(model: nn.Module) -> None:
    """Let `train()` methods of the user's own act once, before the first step.

    Many models freeze batch norm there and count on a loop that calls `model.train()`. What the recipe holds in
    evaluation mode by `eval()` stays in it.
    """
    held = [module for module in model.modules() if not module.training]
    if model.training:
        model.train()
    _put_back(dict.fromkeys(held, False))


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the whole model into evaluation mode; put each module back into its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        _put_back(modes)


def _put_back(modes: dict[nn.Module, bool]) -> None:
    """Set the modules' modes; parents come before their children."""
    for module, is_training in modes.items():
        if module.training != is_training:
            module.train(is_training)  # not only the flag: a module may do more here, as LoRA's layers do
    for module, is_training in modes.items():
        module.training = is_training  # a module in two places has been reached by both parents
