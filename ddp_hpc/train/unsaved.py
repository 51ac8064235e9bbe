"""Names values of the user's code that no checkpoint holds, though the first step changes them: counters, caches, generators, closures, globals."""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import logging
import os
import pickle
import random
import sys
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, BuiltinMethodType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from ddp_hpc.base.names import shorten_names
from ddp_hpc.train.engine.value_copies import CONTENTLESS_TYPES, GENERATORS, MOST_VALUES, generator_state, is_constant
from ddp_hpc.train.recipe import FOREIGN_CODE_PATHS
from ddp_hpc.train.state import digests
from ddp_hpc.train.state.training_state import why_not_plain

log = logging.getLogger(__name__)

_MOST_NAMED = 3
_LARGE_BYTES, _MOST_BYTES = 1 << 20, 64 << 20
"""All bytes are compared of a value that is not large, and of large ones on a CPU up to so many in all, since data may be larger than the
memory. Of any other tensor, the count of its changes is compared; any other array is passed over."""
_NUMBER_AND_TEXT_TYPES = (bool, int, float, complex, str, bytes, np.generic)
_RAW_BYTES_TYPES = (bytearray, array, ctypes.Array, ctypes._SimpleCData)  # noqa: SLF001  the latter two may be shared by processes
_PASS_MARK = hash("a result of a pass, as a loss takes from a layer")
_LARGE_RESULT_MARK = hash("a larger one; a recurrent state, if it has the place of a tensor")
_RESULT_MARKS = (_LARGE_RESULT_MARK, _PASS_MARK)
_FLAT_TYPES = {*_NUMBER_AND_TEXT_TYPES, type(None)}
_CONTAINER_TYPES = (list, tuple, set, frozenset, deque)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOK_KEYS = (
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)
_CACHE_TYPE = type(functools.cache(id))
_CONTENT_BY_TYPE: tuple[tuple[Any, Callable[[Any], Hashable]], ...] = (
    (OrderedDict, lambda one: {*map(type, OrderedDict.keys(one))} <= _FLAT_TYPES and tuple(OrderedDict.keys(one))),
    (dict, lambda one: {*map(type, dict.keys(one))} <= _FLAT_TYPES and tuple(dict.keys(one))),  # the order of its keys
    (_CACHE_TYPE, lambda one: one.cache_info().currsize),
    (GeneratorType, lambda one: one.gi_frame and one.gi_frame.f_lasti),
    (itertools.count, repr),
    ((np.random.BitGenerator, np.random.SeedSequence), lambda one: repr(one.state)),
)
_WRAPPER_TYPES = (MethodType, BuiltinMethodType, staticmethod, classmethod, property, functools.partial)
_RECORD_MODULES = ("tqdm.", "rich.", "torchmetrics.", "torcheval.")
"""Modules whose objects say how a training goes; they decide nothing of it."""
_GLOBAL_HOOKS = [
    one
    for module in (sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"])
    for key, one in vars(module).items()
    if key.startswith("_global_") and isinstance(one, dict)
]
_GLOBAL_GENERATORS = (torch.default_generator, random.getstate.__self__, np.random.mtrand._rand)  # type: ignore[attr-defined]  # noqa: SLF001


class UnsavedWatch:
    """What no checkpoint holds of a model, its optimizer and functions, as it is before the first forward."""

    def __init__(self, model: nn.Module, optimizer: object, **functions: object) -> None:
        self._model, self._optimizer = model, optimizer
        self._roots = {"model": model, "optimizer": optimizer, **functions, "global_hooks": _GLOBAL_HOOKS}
        self._before, self._shapes = self._numbers_now(), self._shapes_of_buffers()
        self._named_before = set[str]()

    def _numbers_now(self) -> dict[str, int]:
        saved = [one for one in self._model.state_dict().values() if isinstance(one, Tensor)]
        return unsaved_numbers(self._roots, saved=saved, optimizer=self._optimizer)

    def _shapes_of_buffers(self) -> dict[str, torch.Size]:
        return {
            ".".join(filter(None, (place, path, name))): one.shape
            for place, root in self._roots.items()
            for path, module in (root.named_modules() if isinstance(root, nn.Module) else ())
            for name, one in module.named_buffers(recurse=False)
            if _is_users(type(module).__module__)
        }

    def changed_places(self) -> list[str]:
        """Return the places of what has changed, each once."""
        now = self._numbers_now()
        found = [place for place in find_changed(self._before, now) if place not in self._named_before]
        self._named_before.update(found, (place for place, number in now.items() if number in _RESULT_MARKS))
        self._before = {**now, **self._before}
        return found

    def why_refused(self, changed: Iterable[str]) -> str:
        """Say which buffer of a class of the user's has changed, but not its shape, as a cache does that grows; empty if none."""
        now = self._shapes_of_buffers()
        for place in changed:
            if place in now and now[place] == self._shapes.get(place):
                return (
                    f"The first step changes the buffer `{place}`, which no checkpoint holds, so a resumed run would not give the same bits. Let the "
                    "model's `state_dict` have it: leave out `persistent=False`, and make a loss part of the model (`model.criterion = loss`). If each "
                    "forward sets it before it reads it, keep it in an attribute that is not a buffer."
                )
        return ""


def find_changed(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Return which of `unsaved_numbers` has changed. What an object made since has in it does not count: a file may be opened late."""
    nothing, found = hash(()), []
    for place, number in now.items():
        parent, _, name = place.rpartition(".")
        old = before.get(place, nothing)
        is_known = place in before or (parent in before and name != "__class__")
        if (old != nothing if number == _LARGE_RESULT_MARK else is_known) and number not in (nothing, _PASS_MARK, old):
            found.append(place)
    return found


def warn_of_changes(places: Sequence[str], what: str = "the first step") -> None:
    """Log which places have changed."""
    if places:
        log.warning(
            "%s changes %s, which no checkpoint holds: a resumed run begins with what the recipe gives it, and may not give the "
            "bits of an undisturbed one. You need do nothing if it is a cache whose content follows from the input alone; else make it a buffer "
            "of the model that its `state_dict` has (not `persistent=False`), keep an optimizer's in its `state[weight]`, or let it follow from the "
            "sample's index and the global generators.",
            what,
            shorten_names([f"`{place}`" for place in places], _MOST_NAMED),
        )


def unsaved_numbers(
    roots: Mapping[str, object], *, saved: Iterable[Tensor] = (), optimizer: object = None, sees_files: bool = True
) -> dict[str, int]:
    """Return a number for each place below `roots`, except for tensors that are `saved` and for what the `optimizer` keeps.

    Without `sees_files`, where a file is read does not count: one that was opened late is mostly read at places that follow from the index.
    """
    walk = _Walk(saved, optimizer, sees_files=sees_files)
    try:
        for root in roots.values():
            walk.names |= {id(one): path for path, one in root.named_modules()} if isinstance(root, nn.Module) else {}
        for place, root in roots.items():
            walk.visit(root, place)
    except Exception as error:  # noqa: BLE001  a user's object may raise anything where it is looked at
        log.info("ddp-hpc cannot check for values that no checkpoint holds: %s: %s", type(error).__name__, error)
        return {}
    return {
        place: next((one for one in _RESULT_MARKS if one in leaves), hash(tuple(leaves)))
        for place, leaves in walk.found.items()
    }


class _Walk:
    """Goes through values, each once, and notes those of which a number can be taken."""

    def __init__(self, saved: Iterable[Tensor], optimizer: object, *, sees_files: bool) -> None:
        self._sees_files = sees_files
        self.found: dict[str, list[int]] = {}
        self._memory = {_memory_key(one) for one in saved}
        self._optimizers = {id(optimizer)} - {id(None)}
        self._seen: dict[int, object] = {id(one): one for one in _GLOBAL_GENERATORS}
        self._bytes_left = _MOST_BYTES
        self.names: dict[int, str] = {}
        """Of the layers, which may be in lists besides."""

    def visit(self, root: object, root_place: str) -> None:
        waiting = [(root, root_place)]
        while waiting and len(self._seen) < MOST_VALUES:
            value, place = waiting.pop()
            if (itself := self._identity(value)) is not None:
                self.found.setdefault(place, []).append(hash(itself))
            if id(value) in self._seen:
                continue
            self._seen[id(value)] = value  # which also keeps its id
            if not _is_librarys(type(value).__module__):
                self.found.setdefault(place, [])
            if (leaf := self._leaf_number(value)) is not None:
                self.found.setdefault(place, []).append(leaf)
            if not _is_flat(value):
                waiting += [
                    (part, name if name[:1] not in (".", "") else place + name) for name, part in self._parts(value)
                ]

    def _identity(self, value: Any) -> Hashable:
        """Return what tells a value from others that may take its place, wherever it is; None where that is its content alone."""
        if isinstance(value, _NUMBER_AND_TEXT_TYPES):
            return type(value), value
        if isinstance(value, CONTENTLESS_TYPES):
            return repr(value)
        if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            return value.__module__, value.__qualname__, getattr(value, "__code__", None)
        # With the place of a library's layer, what is new in it would count.
        return None if _is_librarys(type(value).__module__) else self.names.get(id(value))

    def _take_budget(self, num_bytes: int) -> bool:
        if num_bytes > max(_LARGE_BYTES, self._bytes_left):
            return False
        self._bytes_left -= num_bytes if num_bytes > _LARGE_BYTES else 0
        return True

    def _leaf_number(self, value: Any) -> int | None:  # noqa: PLR0911  one for each kind
        """Return a number that changes with what is in the value; None where it has none, or a checkpoint holds it."""
        if _is_flat(value):
            return hash((type(value), tuple(value)))
        if isinstance(value, Tensor):
            return None if _memory_key(value) in self._memory else self._tensor_number(value)
        if isinstance(value, np.ndarray) and not (isinstance(value, np.memmap) or value.dtype.hasobject):
            return xxhash.xxh3_64_intdigest(value.tobytes()) if self._take_budget(value.nbytes) else None
        if isinstance(value, _RAW_BYTES_TYPES):
            return xxhash.xxh3_64_intdigest(bytes(value)) if self._take_budget(memoryview(value).nbytes) else None
        if isinstance(value, GENERATORS):
            state = generator_state(value)  # pickled, a tensor has other bytes each time
            return zlib.crc32(state.numpy().tobytes() if isinstance(state, Tensor) else pickle.dumps(state))
        for kinds, content_of in _CONTENT_BY_TYPE:
            if isinstance(value, kinds):
                return hash(content_of(value))
        with suppress(OSError, ValueError):  # it is closed, or lies in another file
            if self._sees_files and isinstance(value, io.IOBase) and value.readable() and not value.writable():
                return os.lseek(value.fileno(), 0, os.SEEK_CUR)
        return None

    def _tensor_number(self, value: Tensor) -> int | None:
        if value.grad_fn is not None:
            return _LARGE_RESULT_MARK if value.numel() > 1 else _PASS_MARK
        if why_not_plain(value):
            file, is_sparse = io.BytesIO(), str(value.layout).startswith("torch.sparse")
            with suppress(Exception):  # it has no content, or nobody can save it
                if self._take_budget(value._nnz() * (value.element_size() + 16) if is_sparse else value.nbytes):  # noqa: SLF001
                    torch.save(value.detach(), file)
            return xxhash.xxh3_64_intdigest(file.getvalue())
        extent = (
            value.storage_offset()
            + 1
            + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        )
        if value.numel() and value.untyped_storage().nbytes() < extent * value.element_size():
            return None  # somebody has freed its memory
        is_read = self._take_budget(value.nbytes) if value.is_cpu else value.nbytes <= _LARGE_BYTES
        if not (is_read or value.is_inference()):
            return hash((value._version, value.data_ptr()))  # noqa: SLF001  # no copy of a large tensor
        return hash((value.dtype, tuple(value.shape), *digests.digests_of_tensors({"": value.detach()}).values()))

    def _parts(self, value: Any) -> Iterator[tuple[str, Any]]:  # noqa: PLR0911  one for each kind
        """Yield what is in a value, with `.name` of an attribute, the name of a place elsewhere, or nothing where it has the value's place."""
        # As the built-in types have them: a class of the user's may load each from a disk.
        if isinstance(value, dict):
            return (("", one) for one in dict.values(value))
        if kind := next((one for one in _CONTAINER_TYPES if isinstance(value, one)), None):
            return (("", one) for one in kind.__iter__(value))
        if isinstance(value, FunctionType):
            return _parts_of_function(value) if _is_users(value.__module__) else iter(())
        if isinstance(value, type):
            own = ((kind, *pair) for kind in value.__mro__ if _is_users(kind.__module__) for pair in vars(kind).items())
            return (
                (f"{kind.__qualname__}.{key}", "" if one is None else one)
                for kind, key, one in own
                if key[:2] != "__" or key == "__getitem__"
            )
        if isinstance(value, GeneratorType):
            return (("", one) for one in (value.gi_frame.f_locals if value.gi_frame else {}).values())
        if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            with suppress(TypeError):  # Python 3.14 does not say where an iterator of itertools is
                return (("", one) for one in value.__reduce__()[1:])
        if isinstance(value, _WRAPPER_TYPES):
            return (
                ("", getattr(value, name, None))
                for name in ("__func__", "__self__", "fget", "func", "args", "keywords")
            )
        if id(value) in self._optimizers:
            inner = {id(one) for one in vars(value).values() if isinstance(one, torch.optim.Optimizer)}
            self._optimizers |= inner
            held = ((f".{key}", one) for key, one in vars(value).items())
            return itertools.chain(
                ((key, one) for key, one in held if callable(one) or id(one) in inner or key[1:] in _HOOK_KEYS),
                [("", type(value))],
            )
        is_opaque = (
            isinstance(value, ModuleType)
            or is_constant(type(value))
            or not (hasattr(value, "__dict__") or _attributes(value))
        )
        is_record = any(one.__module__.startswith(_RECORD_MODULES) for one in type(value).__mro__)
        return iter(()) if is_opaque or is_record else _parts_of_object(value)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [
        one for kind in type(value).__mro__ if _is_users(kind.__module__) for one in vars(kind).get("__slots__", ())
    ]
    return {**getattr(value, "__dict__", {}), **{key: getattr(value, key) for key in slots if hasattr(value, key)}}


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    is_librarys = _is_librarys(type(value).__module__)
    has_extra_state = getattr(type(value), "get_extra_state", None) not in (None, nn.Module.get_extra_state)
    for key, one in _attributes(value).items():
        if has_extra_state and key not in _REGISTRIES:
            continue  # it is what that saves
        held = one if key in _REGISTRIES and isinstance(value, nn.Module) else {key: one}
        for name, each in held.items():
            # A library fills its caches and flags when it is used; `state_dict` has what is more.
            is_unset = each is None or each is False or (type(each) is dict and not each)
            if not (is_librarys and is_unset):
                yield f".{name}", each
    if isinstance(value, nn.Module):
        hooks = {key: one for key, one in vars(value).items() if key.endswith("_hooks") and isinstance(one, dict)}
        yield from ((f".{key}", len(one)) for key, one in hooks.items())
        yield ".forward", getattr(value.forward, "__qualname__", "")
    if isinstance(value, nn.Parameter):
        hooks = {key: getattr(value, key) for key in _HOOK_KEYS if hasattr(value, key)}
        yield from ((f".{key}", [*one.values()] if one else 0) for key, one in hooks.items())
        yield ".requires_grad", value.requires_grad
    if not is_librarys:
        yield ".__class__", type(value)


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield attributes, what its closure holds, and the globals that it names."""
    yield from ((f".{key}", one) for key, one in vars(function).items())
    yield from (("", one) for one in function.__defaults__ or ())
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it is empty
            yield f".{name}", cell.cell_contents
    names = [*_names_in_code(function.__code__)]
    package = function.__globals__.get("__package__")
    found = [sys.modules.get(full) for name in names for full in (name, f"{package}.{name}")]  # that it imports itself
    found += [vars(one).get(name) for one in found if _is_users_module(one) for name in names]
    found += [function.__globals__.get(name) for name in names]
    modules = {one.__name__: one for one in found if _is_users_module(one)}.values()
    for place, values in [(function.__module__, function.__globals__), *((one.__name__, vars(one)) for one in modules)]:
        yield from ((f"{place}.{name}", values.get(name)) for name in names)


def _is_users_module(value: object) -> TypeGuard[ModuleType]:
    return isinstance(value, ModuleType) and _is_users(value.__name__)


def _names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in_code(one)


def _memory_key(value: Tensor) -> tuple[int, int]:
    """Return what is the same for a tensor and for a `detach` of it."""
    return (id(value), 0) if why_not_plain(value) else (value.data_ptr(), value.numel())


def _is_flat(value: object) -> bool:
    return type(value) in _CONTAINER_TYPES and {*map(type, value)} <= _FLAT_TYPES  # type: ignore[call-overload]  # fast, as it may be long


@functools.cache
def _is_users(module: str) -> bool:
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return bool(file) and not any(part in file for part in FOREIGN_CODE_PATHS)


@functools.cache
def _is_librarys(module: str) -> bool:
    """Tell whether it is of an installed package; users put state into objects of PyTorch's and Python's own."""
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return any(part in file for part in FOREIGN_CODE_PATHS[:2]) and not module.startswith("torch.")
