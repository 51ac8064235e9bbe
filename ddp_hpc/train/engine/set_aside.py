"""Keeps what a pass through the model may change, and puts it back: tensors, counters, random generators, gradients, hooks.

What lies outside of the model and of the recipe's functions (globals, closures, a library's own memory) is not kept.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hpc.base.names import shorten_names
from ddp_hpc.train.engine.value_copies import ValuesToKeep, keep_items, keep_tensor
from ddp_hpc.train.state import rng

log = logging.getLogger(__name__)

_REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module with what is registered."""
_HOOK_KEYS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MOST_NAMED = 3
_MEMORY_SHARE = 1 / 20
"""Of a GPU's free memory: copies that need more are made in the host's memory, so that a training that fits needs no more for its start."""


@contextmanager
def undo_trial(model: nn.Module, others: Iterable[object], device: torch.device) -> Iterator[None]:
    """Do as `restore_after`, but put back what can be, and log once what cannot."""
    refused: list[str] = []
    with restore_after(model, others, device, refused=refused):
        if refused:
            _say_once(shorten_names(refused, _MOST_NAMED, between="; "))
        yield


@functools.cache
def _say_once(what: str) -> None:
    log.warning(
        "each attempt tries the model on one batch before its first step, and puts back what that changes, as far as it knows how to copy it. "
        "It cannot put back this: %s. If the model changes it in a forward or backward pass, a resumed run does not give the bits of an "
        "undisturbed one. Keep such state in tensors, numbers, lists, dicts or plain objects.",
        what,
    )


@contextmanager
def restore_after(
    model: nn.Module, others: Iterable[object], device: torch.device, *, refused: list[str] | None = None
) -> Iterator[None]:
    """Take hooks off the parameters; afterwards restore the model, the `others` (a loss, say) and all generators.

    Needs memory for a copy of the model's weights and buffers. A list `refused` takes the values that nobody can put back.

    Raises:
        NotKeptError: before anything has changed, if there is something that cannot be put back, and no list for it.
    """
    others = [*others]
    modules = [one for one in _objects_to_keep(model, others) if isinstance(one, nn.Module)]
    tensors = _registered_tensors(modules)
    copies_on = device_for_copies(tensors, device)
    restores = [
        *values_to_keep(model, others, refused=refused).copy_for_restore(),
        *(keep_items(held) for one in modules for name in _REGISTRIES if isinstance(held := vars(one).get(name), dict)),
        *(keep_tensor(one, copies_on=copies_on) for one in tensors),
    ]
    parameters = [one for module in modules for one in module.parameters(recurse=False)]
    gradients = [(one, one.grad) for one in parameters]
    hooks = [found for one in parameters for name in _HOOK_KEYS if (found := getattr(one, name))]
    kept = [dict(found) for found in hooks]
    try:
        with rng.preserve_states(device):
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
        for restore in restores:
            restore()


def values_to_keep(model: nn.Module, others: Iterable[object], *, refused: list[str] | None = None) -> ValuesToKeep:
    """Return what is to be kept of the attributes of all modules, and of the `others`."""
    others = [*others]
    holders = _objects_to_keep(model, others)
    modules = [one for one in holders if isinstance(one, nn.Module)]
    found = ValuesToKeep([*modules, *_registered_tensors(modules)], refused)
    names = {id(one): f"model.{name}" if name else "model" for name, one in model.named_modules()}
    for holder in holders:
        if isinstance(holder, (nn.Module, FunctionType)):
            found.add_holder(holder, names.get(id(holder), type(holder).__name__), without=_REGISTRIES)
    for one in others:
        found.add(one, getattr(one, "__name__", type(one).__name__))
    return found


def _registered_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of modules, each once."""
    found = [one for of in modules for name in _REGISTRIES[:2] for one in getattr(of, name).values() if one is not None]
    return [*{id(one): one for one in found}.values()]


def device_for_copies(tensors: Iterable[Tensor], device: torch.device) -> torch.device | None:
    """Return where copies of these tensors are made; None means beside them."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return choose_copy_device(sum(one.numel() * one.element_size() for one in tensors), free)


def choose_copy_device(num_bytes: int, free: int) -> torch.device | None:
    """Return where copies of a GPU's tensors are made; None means beside them."""
    return None if num_bytes <= free * _MEMORY_SHARE else torch.device("cpu")


def _objects_to_keep(model: nn.Module, others: Iterable[object]) -> list[Any]:
    """Return the objects whose attributes are kept: all modules, and objects that are called."""
    found: list[Any] = [*model.modules()]
    for one in _called_objects(others):
        of = getattr(one, "__self__", one)  # of a method, its object
        found += of.modules() if isinstance(of, nn.Module) else [of] if hasattr(of, "__dict__") else []
    return [*{id(one): one for one in found if not isinstance(one, (type, ModuleType))}.values()]


def _called_objects(others: Iterable[object]) -> Iterator[object]:
    """Yield functions and objects, and what partial functions have of these."""
    for one in others:
        yield one
        if isinstance(one, functools.partial):
            yield from _called_objects([one.func, *one.args, *one.keywords.values()])
