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
from collections.abc import Callable, Iterable, Sequence
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
KeepFunction = Callable[[Any], Restore]
Children = Iterable[tuple[str, Any]]

MOST_VALUES = 10_000
"""How many values are examined, so that it takes milliseconds."""
_FLAT_PER_VALUE = 100
"""So many unchanging values in one container count as one value."""
MOST_BYTES = 1 << 30
"""Of the copies of tensors and arrays that are no buffers and parameters."""
_DEEPEST = 50
"""How many values may be around a value, one in the other."""

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class NotKeptError(TypeError):
    """A value that cannot be put back; the text says where it is and of what type."""


def generator_state(generator: Any) -> Any:
    """Return the state of a generator: tensors, arrays, numbers and texts in tuples and dicts."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set what `generator_state` returned."""
    if isinstance(generator, (torch.Generator, np.random.RandomState)):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


# --- how a value is put back -----------------------------------------------------------------------------------------


def keep_tensor(value: Tensor, *, copies_on: torch.device | None = None) -> Restore:
    """Copy a tensor, where it is or on another device; return what gives it its memory and its numbers of now again."""
    whole, before, needs_gradient = value.detach(), _memory_layout(value), value.requires_grad
    part = whole
    if before is not None and 0 in value.stride():  # an expanded one cannot be written as a whole
        part = whole[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
    copied = part.clone() if copies_on is None else part.to(copies_on, copy=True)

    def restore() -> None:
        if _memory_layout(value) != before:
            value.data = whole
        # Its version does not count the copy: `unsaved_numbers` takes that of a large tensor for the count of its changes.
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(part):  # noqa: SLF001
            part.copy_(copied)
        if value.is_leaf and value.requires_grad != needs_gradient:
            value.requires_grad_(needs_gradient)

    return restore


def _memory_layout(value: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Return which memory a tensor has, and how; None for those without one address (sparse, nested and others)."""
    if value.layout != torch.strided or value.is_nested:
        return None
    return value.data_ptr(), tuple(value.shape), value.stride()


def _keep_content(value: Any) -> Restore:
    """Keep what an array or a bytearray holds, or the state of a generator."""
    if isinstance(value, GENERATORS):
        state = generator_state(value)
        return lambda: set_generator_state(value, state)
    copied, whole = value.copy(), slice(None) if isinstance(value, bytearray) else ...

    def restore() -> None:
        value[whole] = copied

    return restore


def keep_items(value: Any) -> Restore:
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


def _keep_attributes(value: Any) -> Restore:
    return keep_items(vars(value))


def _keep_nothing(value: Any) -> Restore:
    del value
    return lambda: None


# --- what is in a value ----------------------------------------------------------------------------------------------


def _children(value: Any, keep: KeepFunction) -> Children:
    for name in _PARTS_BY_TYPE.get(type(value), ()):
        yield f".{name}", getattr(value, name)
    if isinstance(value, dict):
        for key, one in value.items():
            name = repr(key) if type(key) in (str, int) else "..."
            yield f" key {name}", key
            yield f"[{name}]", one
    elif isinstance(value, (list, set, deque, tuple, frozenset)):
        yield from ((f"[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, weakref.ref):
        yield "()", value()
    elif keep is _keep_attributes or isinstance(value, Tensor):
        yield from ((f".{key}", one) for key, one in vars(value).items())


_METHOD_TYPES = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_PARTS_BY_TYPE: dict[type, Sequence[str]] = {
    **dict.fromkeys(_METHOD_TYPES, ("__self__",)),
    defaultdict: ("default_factory",),
    functools.partial: ("func", "args", "keywords"),
}
"""By its exact type: attributes of a value that `vars` does not have."""
_KEEP_BY_TYPE: dict[type, KeepFunction] = {
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict, list, set, deque), keep_items),
    **dict.fromkeys((tuple, frozenset, weakref.ref, *_METHOD_TYPES), _keep_nothing),
    **dict.fromkeys((bytearray, *GENERATORS), _keep_content),
    **dict.fromkeys((types.SimpleNamespace, functools.partial), _keep_attributes),
}
"""By its exact type: how a value is put back."""

_TIME_TYPES = (dt.date, dt.datetime, dt.time, dt.timedelta, dt.timezone)
CONTENTLESS_TYPES = (
    *(*_TIME_TYPES, Decimal, Fraction, UUID, range, slice, re.Pattern),
    *(torch.dtype, torch.device, Enum, PurePath),
)
"""Types of values that never change, but may give place to others."""
_CONSTANTS = frozenset({
    *(bool, int, float, complex, str, bytes, type(None), type(...), type(NotImplemented), object),
    *(torch.Size, torch.layout, torch.memory_format, torch.finfo, torch.iinfo, *CONTENTLESS_TYPES),
    *(types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc),
    *(type(threading.Lock()), type(threading.RLock()), torch.jit.ScriptFunction),
})  # fmt: skip
"""Types of values that need no keeping."""
_LIBRARY_TYPES = (logging.Logger, np.generic, np.dtype, dist.ProcessGroup, torch.Stream)
_CONSTANT_BASES = (type, types.ModuleType, *_LIBRARY_TYPES, *CONTENTLESS_TYPES)
"""Their subclasses need none either."""
_NUMBER_AND_TEXT_TYPES = (int, float, complex, str, bytes)
_SKIP_MODULES = ("ddp_hpc.train.", "torch._dynamo.", "torch._C", "torch.jit.", "torch.fx.")
"""Modules of Python whose objects a hook or a compiled model may hold, but which are no part of what it computes with."""


class ValuesToKeep:
    """A walk through values, which copies nothing and finds what is to be kept."""

    def __init__(self, registered: Iterable[object], refused: list[str] | None = None) -> None:
        """Take `registered` modules, parameters and buffers as kept by others.

        A list `refused` takes the values that nobody can put back; all others are found.
        """
        self._refused = refused
        self._seen: dict[int, object] = {id(one): one for one in registered}
        self._found: list[tuple[KeepFunction, Any]] = []
        self._num_values = 0
        self._num_bytes = 0

    def copy_for_restore(self) -> list[Restore]:
        """Copy what was found, and return what puts it back."""
        return [keep(value) for keep, value in self._found]

    def add_holder(self, holder: Any, place: str, *, without: Iterable[str]) -> None:
        """Examine the attributes of a module or a function, except those in `without`."""
        self._found.append((_keep_attributes, holder))
        for key, one in vars(holder).items():
            if key not in without:
                self.add(one, f"{place}.{key}")

    def add(self, value: Any, place: str, depth: int = 0) -> None:
        """Examine a value and all that is in it; `place` names it."""
        kind = type(value)
        if self._num_values > MOST_VALUES or is_constant(kind) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        keep = self._find_keep_function(value, kind, place)
        if keep is None:  # refused: nobody knows what is in it
            return
        if keep is not _keep_nothing:
            self._found.append((keep, value))
        if depth == _DEEPEST:
            self._refuse(f"`{place}` is in more than {_DEEPEST} other values")
            return
        if _is_flat(value, kind):
            self._count_within_limit(len(value) // _FLAT_PER_VALUE, place)
            return
        for name, one in _children(value, keep):
            if not self._count_within_limit(1, place):
                return
            self.add(one, place + name, depth + 1)

    def _find_keep_function(self, value: Any, kind: type, place: str) -> KeepFunction | None:
        if kind in _KEEP_BY_TYPE:
            return _KEEP_BY_TYPE[kind]
        if issubclass(kind, tuple) and not hasattr(value, "__dict__"):
            return _keep_nothing
        if kind in (Tensor, nn.Parameter):
            return keep_tensor if self._has_room(value.numel() * value.element_size(), place) else _keep_nothing
        if kind is np.ndarray and not value.dtype.hasobject:
            return _keep_content if value.flags.writeable and self._has_room(value.nbytes, place) else _keep_nothing
        if _is_plain(kind):
            return _keep_attributes
        self._refuse(f"`{place}` is of the type {kind.__name__}")
        return None

    def _refuse(self, what: str) -> None:
        if self._refused is None:
            raise NotKeptError(what)
        self._refused.append(what)

    def _count_within_limit(self, num: int, place: str) -> bool:
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
    if kind in _KEEP_BY_TYPE:
        return False
    if kind in _CONSTANTS or issubclass(kind, _CONSTANT_BASES) or kind.__module__.startswith(_SKIP_MODULES):
        return True
    return issubclass(kind, _NUMBER_AND_TEXT_TYPES) and not kind.__dictoffset__


def _is_flat(value: Any, kind: type) -> bool:
    """Tell whether a container has nothing that can change: fast, as vocabularies are large."""
    if kind in (dict, OrderedDict, Counter):
        return {*map(type, value), *map(type, value.values())} <= _CONSTANTS
    return kind in (list, tuple, set, frozenset, deque) and {*map(type, value)} <= _CONSTANTS


class _Plain:
    pass


def _is_plain(kind: type) -> bool:
    """Tell whether objects of a class are no more than their attributes."""
    slots = [one.__dict__.get("__slots__", ()) for one in kind.__mro__]
    names = {name for some in slots for name in ([some] if isinstance(some, str) else some)}
    has_slots = bool(names - {"__dict__", "__weakref__"})
    return bool(kind.__dictoffset__) and not has_slots and kind.__basicsize__ <= _Plain.__basicsize__
