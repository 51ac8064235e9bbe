"""Keeps what a pass through the model may change, and puts it back: tensors, counters, random generators, gradients, hooks.

What lies outside of the model and of the recipe's functions (globals, closures, a library's own memory) is not kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from ddp_hpc.train.engine.kept_values import ToKeep, refilled
from ddp_hpc.train.engine.traces import put_back
from ddp_hpc.train.state import rng

_OF_PYTORCH = ("_parameters", "_buffers", "_modules")
"""Attributes of a module whose tensors `put_back` restores."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def set_aside(model: nn.Module, others: Iterable[object], device: torch.device) -> Iterator[None]:
    """Take hooks off the parameters; afterwards restore the model, the `others` (a loss, say) and all generators.

    Needs memory for a copy of the model's weights and buffers.

    Raises:
        NotKeptError: before anything has changed, if there is something that cannot be put back.
    """
    others = [*others]
    holders = _holders(model, others)
    restores = to_keep(model, others).restores()
    registered = [refilled(vars(one)[name]) for one in holders if isinstance(one, nn.Module) for name in _OF_PYTORCH]
    parameters = [
        one for module in holders if isinstance(module, nn.Module) for one in module.parameters(recurse=False)
    ]
    gradients = [(one, one.grad) for one in parameters]
    hooks = [found for one in parameters for name in _HOOKS if (found := getattr(one, name))]
    kept = [dict(found) for found in hooks]
    modules = [one for one in holders if isinstance(one, nn.Module)]
    try:
        with rng.preserved(device), put_back(nn.ModuleList(modules), with_parameters=True):
            for found in hooks:
                found.clear()  # they may count, keep what they see, or step the optimizer
            for one in parameters:
                one.grad = None
            yield
    finally:
        for found, before in zip(hooks, kept, strict=True):
            found.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for restore in (*restores, *registered):
            restore()


def to_keep(model: nn.Module, others: Iterable[object]) -> ToKeep:
    """Return what is to be kept of the attributes of all modules, and of the `others`.

    Raises:
        NotKeptError: if there is something that cannot be put back.
    """
    others = [*others]
    holders = _holders(model, others)
    modules = [one for one in holders if isinstance(one, nn.Module)]
    tensors = [one for of in modules for name in _OF_PYTORCH for one in getattr(of, name).values() if one is not None]
    found = ToKeep([*modules, *tensors])
    names = {id(one): f"model.{name}" if name else "model" for name, one in model.named_modules()}
    for holder in holders:
        if isinstance(holder, (nn.Module, FunctionType)):
            found.add_holder(holder, names.get(id(holder), type(holder).__name__), without=_OF_PYTORCH)
    for one in others:
        found.add(one, getattr(one, "__name__", type(one).__name__))
    return found


def _holders(model: nn.Module, others: Iterable[object]) -> list[Any]:
    """Return the objects whose attributes are kept: all modules, and objects that are called."""
    found: list[Any] = [*model.modules()]
    for one in others:
        of = getattr(one, "__self__", one)  # of a method, its object
        found += of.modules() if isinstance(of, nn.Module) else [of] if hasattr(of, "__dict__") else []
    return [*{id(one): one for one in found if not isinstance(one, (type, ModuleType))}.values()]
