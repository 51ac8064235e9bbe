"""Finds what a pass through a model may change in the values that it holds, and puts it back; refuses, by name, values of any other kind."""

from __future__ import annotations

import datetime as dt
import functools
import logging
import operator
import random
import re
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

Restore = Callable[[], object]
Keep = Callable[[Any], Restore]
Children = Iterable[tuple[str, Any]]

MOST_VALUES = 10_000
"""How many values are examined, so that it takes milliseconds."""
_FLAT = 100
"""So many unchanging values in one container count as one value."""
MOST_BYTES = 1 << 30
"""Of the copies of tensors and arrays that are no buffers and parameters."""
_DEEPEST = 50
"""How many values may be around a value, one in the other."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class NotKeptError(TypeError):
    """A value that cannot be put back; the text says where it is and of what type."""


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


# --- how a value is put back -----------------------------------------------------------------------------------------


def kept_tensor(value: Tensor, *, copies_on: torch.device | None = None) -> Restore:
    """Copy a tensor, where it is or on another device; return what gives it its memory and its numbers of now again."""
    whole, before, needs_gradient = value.detach(), _memory(value), value.requires_grad
    part = whole
    if before is not None and 0 in value.stride():  # an expanded one cannot be written as a whole
        part = whole[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
    copied = part.clone() if copies_on is None else part.to(copies_on, copy=True)

    def restore() -> None:
        if _memory(value) != before:
            value.data = whole
        # Its version does not count the copy: `unsaved` takes that of a large tensor for the count of its changes.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(part):  # noqa: SLF001
            part.copy_(copied)
        if value.is_leaf and value.requires_grad != needs_gradient:
            value.requires_grad_(needs_gradient)

    return restore


def _memory(value: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Return which memory a tensor has, and how; None for those without one address (sparse, nested and others)."""
    if value.layout != torch.strided or value.is_nested:
        return None
    return value.data_ptr(), tuple(value.shape), value.stride()


def _array(value: np.ndarray[Any, Any]) -> Restore:
    copied = value.copy()

    def restore() -> None:
        value[...] = copied

    return restore


def _generator(value: Any) -> Restore:
    state = state_of(value)
    return lambda: set_state(value, state)


def _bytes(value: bytearray) -> Restore:
    content = bytes(value)

    def restore() -> None:
        value[:] = content

    return restore


def refilled(value: Any) -> Restore:
    """Return what gives a container its content of now again; that itself is as it is then.

    What it holds still is not written: another thread may use the container, or the object whose attributes it has.
    """
    before = [*value.items()] if isinstance(value, dict) else [*value]
    parts = _parts(value)

    def restore() -> None:
        now = _parts(value)
        if len(now) == len(parts) and all(map(operator.is_, now, parts)):
            return
        if not isinstance(value, dict):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(before)
            return
        for key in value.keys() - dict(before):
            del value[key]
        if [*value] != [key for key, _ in before]:
            value.clear()  # their order counts
        (dict.update if isinstance(value, Counter) else type(value).update)(value, before)

    return restore


def _parts(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else [*value]


def _attributes(value: Any) -> Restore:
    return refilled(vars(value))


def _nothing(value: Any) -> Restore:
    del value
    return lambda: None


# --- what is in a value ----------------------------------------------------------------------------------------------


def _in_sequence(value: Iterable[Any]) -> Children:
    return ((f"[{number}]", one) for number, one in enumerate(value))


def _in_dict(value: dict[Any, Any]) -> Children:
    for key, one in value.items():
        name = repr(key) if type(key) in (str, int) else "..."
        yield f" key {name}", key
        yield f"[{name}]", one


def _in_default(value: defaultdict[Any, Any]) -> Children:
    yield ".default_factory", value.default_factory
    yield from _in_dict(value)


def _in_object(value: Any) -> Children:
    return ((f".{key}", one) for key, one in vars(value).items())


def _in_partial(value: functools.partial[Any]) -> Children:
    yield from [(".func", value.func), (".args", value.args), (".keywords", value.keywords)]
    yield from _in_object(value)


def _of_method(value: Any) -> Children:
    yield ".__self__", value.__self__


def _referred(value: weakref.ref[Any]) -> Children:
    yield "()", value()


def _none(value: Any) -> Children:
    del value
    return ()


_TYPES: dict[type, tuple[Keep, Callable[[Any], Children]]] = {
    **dict.fromkeys((dict, OrderedDict, Counter), (refilled, _in_dict)),
    **dict.fromkeys((list, set, deque), (refilled, _in_sequence)),
    **dict.fromkeys((tuple, frozenset), (_nothing, _in_sequence)),
    **dict.fromkeys(GENERATORS, (_generator, _none)),
    **dict.fromkeys((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), (_nothing, _of_method)),
    defaultdict: (refilled, _in_default),
    bytearray: (_bytes, _none),
    types.SimpleNamespace: (_attributes, _in_object),
    functools.partial: (_attributes, _in_partial),
    weakref.ref: (_nothing, _referred),
}
"""By its exact type: how a value is put back, and what is in it."""

_CONSTANT = frozenset({
    *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), range, object),
    *(dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone, Decimal, Fraction, UUID),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, torch.finfo, torch.iinfo),
    *(types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, re.Pattern, np.ufunc),
    *(type(threading.Lock()), type(threading.RLock()), torch.jit.ScriptFunction),
})  # fmt: skip
"""Types of values that need no keeping."""
_ALSO_CONSTANT = (
    type,
    Enum,
    types.ModuleType,
    PurePath,
    logging.Logger,
    np.generic,
    np.dtype,
    dist.ProcessGroup,
    torch.Stream,
)
"""Their subclasses need none either."""
_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes)
_NOT_THE_MODELS = ("ddp_hpc.train.", "torch._dynamo.", "torch._C", "torch.jit.", "torch.fx.")
"""Modules of Python whose objects a hook or a compiled model may hold, but which are no part of what it computes with."""


class ToKeep:
    """A walk through values, which copies nothing and finds what is to be kept."""

    def __init__(self, registered: Iterable[object], refused: list[str] | None = None) -> None:
        """Take `registered` modules, parameters and buffers as kept by others.

        A list `refused` takes the values that nobody can put back; all others are found.
        """
        self._refused = refused
        self._seen: dict[int, object] = {id(one): one for one in registered}
        self._found: list[tuple[Keep, Any]] = []
        self._num_values = 0
        self._num_bytes = 0

    def restores(self) -> list[Restore]:
        """Copy what was found, and return what puts it back."""
        return [keep(value) for keep, value in self._found]

    def add_holder(self, holder: Any, place: str, *, without: Iterable[str]) -> None:
        """Examine the attributes of a module or a function, except those in `without`."""
        self._found.append((_attributes, holder))
        for key, one in vars(holder).items():
            if key not in without:
                self.add(one, f"{place}.{key}")

    def add(self, value: Any, place: str, depth: int = 0) -> None:
        """Examine a value and all that is in it; `place` names it."""
        kind = type(value)
        if self._num_values > MOST_VALUES or is_constant(kind) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        keep, children = self._how(value, kind, place)
        if keep is not _nothing:
            self._found.append((keep, value))
        if depth == _DEEPEST:
            self._refuse(f"`{place}` is in more than {_DEEPEST} other values")
            return
        if _is_flat(value, kind):
            self._has_counted(len(value) // _FLAT, place)
            return
        for name, one in children(value):
            if not self._has_counted(1, place):
                return
            self.add(one, place + name, depth + 1)

    def _how(self, value: Any, kind: type, place: str) -> tuple[Keep, Callable[[Any], Children]]:
        if kind in _TYPES:
            return _TYPES[kind]
        if issubclass(kind, tuple) and not hasattr(value, "__dict__"):
            return _nothing, _in_sequence
        if kind in (Tensor, nn.Parameter):
            is_kept = self._has_room(value.numel() * value.element_size(), place)
            return kept_tensor if is_kept else _nothing, _in_object
        if kind is np.ndarray and not value.dtype.hasobject:
            is_kept = value.flags.writeable and self._has_room(value.nbytes, place)
            return _array if is_kept else _nothing, _none
        if _is_plain(kind):
            return _attributes, _in_object
        self._refuse(f"`{place}` is of the type {kind.__name__}")
        return _nothing, _none

    def _refuse(self, what: str) -> None:
        if self._refused is None:
            raise NotKeptError(what)
        self._refused.append(what)

    def _has_counted(self, num: int, place: str) -> bool:
        self._num_values += num
        if self._num_values - num <= MOST_VALUES < self._num_values:  # said once
            self._refuse(f"there are too many values up to `{place}` (at most {MOST_VALUES} are examined)")
        return self._num_values <= MOST_VALUES

    def _has_room(self, num: int, place: str) -> bool:
        if self._num_bytes + num > MOST_BYTES:
            self._refuse(
                f"tensors and arrays up to `{place}` that are not buffers need more than {MOST_BYTES >> 20} MiB"
            )
            return False
        self._num_bytes += num
        return True


def is_constant(kind: type) -> bool:
    """Tell whether values of a type need no keeping."""
    if kind in _TYPES:
        return False
    if kind in _CONSTANT or issubclass(kind, _ALSO_CONSTANT) or kind.__module__.startswith(_NOT_THE_MODELS):
        return True
    return issubclass(kind, _NUMBERS_AND_TEXTS) and not kind.__dictoffset__


def _is_flat(value: Any, kind: type) -> bool:
    """Tell whether a container has nothing that can change: fast, as vocabularies are large."""
    if kind in (dict, OrderedDict, Counter):
        return {*map(type, value), *map(type, value.values())} <= _CONSTANT
    return kind in (list, tuple, set, frozenset, deque) and {*map(type, value)} <= _CONSTANT


class _Plain:
    pass


def _is_plain(kind: type) -> bool:
    """Tell whether objects of a class are no more than their attributes."""
    has_slots = any({*_names(one.__dict__.get("__slots__", ()))} - {"__dict__", "__weakref__"} for one in kind.__mro__)
    return bool(kind.__dictoffset__) and not has_slots and kind.__basicsize__ <= _Plain.__basicsize__


def _names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots
