"""Keeps what a pass through the model may change, and puts it back: tensors, counters, random generators, gradients, hooks.

What lies outside of the model and of the recipe's functions (globals, closures, a library's own memory) is not kept.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddp_hpc.train.data.sent_values import NotSendableError, taken_apart
from ddp_hpc.train.engine.traces import put_back
from ddp_hpc.train.state import rng

Restore = Callable[[], object]
_OF_PYTORCH = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module whose tensors `put_back` restores."""
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_MOST_ELEMENTS = 10_000
"""Of a value that another rank takes over."""
_DEEPEST = 8
"""How deep containers in containers are kept."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def set_aside(model: nn.Module, others: Iterable[object], device: torch.device) -> Iterator[None]:
    """Take hooks off the parameters; afterwards restore the model, the `others` (a loss, say) and all generators.

    Needs memory for a copy of the model's weights and buffers.
    """
    holders = _holders(model, others)
    restores = [_kept_attributes(one) for one in holders]
    parameters = [
        one for module in holders if isinstance(module, nn.Module) for one in module.parameters(recurse=False)
    ]
    gradients = [(one, one.grad) for one in parameters]
    hooks = [found for one in parameters for name in _HOOKS if (found := getattr(one, name))]
    kept = [dict(found) for found in hooks]
    modules = [one for one in others if isinstance(one, nn.Module)]
    try:
        with rng.preserved(device), put_back(nn.ModuleList([model, *modules]), with_parameters=True):
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


def rank_state(model: nn.Module, others: Iterable[object]) -> list[dict[str, Any]]:
    """Return what each rank may have of its own in the attributes of modules and of `others`: small values, and generators' states.

    It has tensors, arrays and numbers in lists, tuples, dicts and queues, by name, for each holder; holders come in the same order on each rank.
    """
    return [
        {
            key: state_of(one) if isinstance(one, _GENERATORS) else one
            for key, one in vars(holder).items()
            if _is_own(key, one)
        }
        for holder in _holders(model, others)
    ]


def take_over(model: nn.Module, others: Iterable[object], states: Sequence[dict[str, Any]]) -> None:
    """Set what `rank_state` has returned on another rank.

    Raises:
        ValueError: if this rank has another number of holders.
    """
    for holder, state in zip(_holders(model, others), states, strict=True):
        own = vars(holder)
        for key, value in state.items():
            if isinstance(own.get(key), _GENERATORS):
                set_state(own[key], value)
            elif isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                own[key] = value.to(own[key].device)
            else:
                own[key] = value


def _is_own(key: str, value: Any) -> bool:
    if isinstance(value, _GENERATORS):
        return True
    if key in _OF_MODULES or not isinstance(value, (bool, int, float, Tensor, np.ndarray, list, tuple, dict, deque)):
        return False
    size = value.numel() if isinstance(value, Tensor) else value.size if isinstance(value, np.ndarray) else 0
    if size > _MOST_ELEMENTS or (isinstance(value, Sized) and len(value) > _MOST_ELEMENTS):
        return False
    try:
        return not taken_apart(value).classes and not isinstance(value, nn.Parameter)
    except NotSendableError:
        return False


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def state_of(generator: Any) -> Any:
    """Return the state of a generator: tensors, arrays, numbers and texts in tuples and dicts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def set_state(generator: Any, state: Any) -> None:
    """Set what `state_of` returned."""
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _holders(model: nn.Module, others: Iterable[object]) -> list[Any]:
    """Return the objects whose attributes are kept: all modules, and objects that are called."""
    found: list[Any] = [*model.modules()]
    for one in others:
        of = getattr(one, "__self__", one)  # of a method, its object
        found += of.modules() if isinstance(of, nn.Module) else [of] if hasattr(of, "__dict__") else []
    return [*{id(one): one for one in found if not isinstance(one, (type, ModuleType))}.values()]


def _kept_attributes(holder: Any) -> Restore:
    own = vars(holder)
    before = {key: value for key, value in own.items() if key not in _OF_PYTORCH}
    restores = [_kept(value, 0) for value in before.values()]

    def restore() -> None:
        for key in [key for key in own if key not in before and key not in _OF_PYTORCH]:
            del own[key]
        own.update(before)
        for one in restores:
            one()

    return restore


def _kept(value: Any, depth: int) -> Restore:
    """Return what gives a value that can change its content of now again."""
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        copied = value.detach().clone()
        return lambda: value.detach().copy_(copied)
    if isinstance(value, _GENERATORS):
        state = state_of(value)
        return lambda: set_state(value, state)
    if isinstance(value, (dict, list, set, deque)) and depth < _DEEPEST:
        content: Any = type(value)(value) if type(value) in (dict, list, set) else value.copy()
        inner = [_kept(one, depth + 1) for one in (content.values() if isinstance(content, dict) else content)]

        def refill() -> None:
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(content)
            for one in inner:
                one()

        return refill
    return lambda: None
