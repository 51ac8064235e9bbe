"""A batch as text and bytes, so that another rank can have the same one; nothing that is received can run code.

Tensors and arrays are sent as bytes, what holds them as JSON. Objects are made only of classes of which the receiver has an object in a
batch of its own.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MOST_BYTES = 1 << 30
"""Of the tensors of one message."""
_ALIGNED = 16
"""Each tensor begins at a multiple of so many bytes, as PyTorch needs it to read them as numbers."""
_PLAIN = (str, int, float, bool, type(None))


class NotSendableError(TypeError):
    """Values that cannot be sent; the text says what they have."""


@dataclass
class Taken:
    """Values taken apart: containers as lists that JSON can hold, and the tensors in them, which are not copied."""

    shape: Any
    tensors: list[Tensor]
    classes: dict[str, type] = field(default_factory=dict)
    """Those of the objects in it, by name."""


def taken_apart(value: Any) -> Taken:
    """Take values apart. The containers are new, so it does not matter what becomes of the old ones.

    Raises:
        NotSendableError: if there is something that cannot be sent.
    """
    taken = Taken(None, [])
    taken.shape = _shape(value, taken, "the batch", ())
    return taken


def _shape(value: Any, into: Taken, place: str, above: tuple[int, ...]) -> list[Any]:
    """Return values as what `_Reader` makes them of; `above` are the ids of the containers around them."""
    if type(value) in _PLAIN:
        return ["plain", value]
    if id(value) in above:
        raise NotSendableError(f"{place} contains itself")
    if type(value) is np.ndarray:  # no subclass: a masked array has a mask besides
        return ["array", *_of_tensor(_as_tensor(value, place), into, place)[1:]]
    if isinstance(value, Tensor):
        return _of_tensor(value, into, place)
    return _of_container(value, into, place, (*above, id(value)))


def _as_tensor(value: np.ndarray[Any, Any], place: str) -> Tensor:
    try:
        return torch.from_numpy(np.require(value, requirements=["C", "W"]))
    except (
        TypeError,
        ValueError,
    ) as error:  # of objects, texts or times, longer than a double, or of the other byte order
        raise NotSendableError(f"{place} is an array of {value.dtype.str!r}, which PyTorch cannot hold") from error


def _of_tensor(value: Tensor, into: Taken, place: str) -> list[Any]:
    if value.layout != torch.strided or value.is_nested or value.is_quantized or value.is_meta:
        raise NotSendableError(f"{place} is a sparse, nested, quantised or meta tensor")
    if type(value) not in (Tensor, nn.Parameter):
        raise NotSendableError(f"{place} is a tensor of the type {type(value).__name__}")
    into.tensors.append(value.detach())
    return ["tensor", str(value.dtype).removeprefix("torch."), [*value.shape]]


def _of_container(value: Any, into: Taken, place: str, above: tuple[int, ...]) -> list[Any]:
    kind = type(value)
    if kind in (dict, OrderedDict):
        odd = next((key for key in value if type(key) not in _PLAIN), None)
        if odd is not None:
            raise NotSendableError(f"{place} has a key of the type {type(odd).__name__}")
        items = [[key, _shape(one, into, f"{place}[{key!r}]", above)] for key, one in value.items()]
        return [kind.__name__, items]
    if kind is deque:
        return ["deque", value.maxlen, _of_container([*value], into, place, above)[1]]
    if kind in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = [_shape(one, into, f"{place}[{number}]", above) for number, one in enumerate(value)]
        return [kind.__name__, items] if kind in (list, tuple) else ["named tuple", _class(value, into), items]
    if not _is_plain_object(value):
        raise NotSendableError(f"{place} is of the type {kind.__name__}")
    items = [[key, _shape(one, into, f"{place}.{key}", above)] for key, one in vars(value).items()]
    return ["object", _class(value, into), items]


def _is_plain_object(value: Any) -> bool:
    """Tell whether an object is no more than its attributes."""
    kind = type(value)
    is_pythons = all(getattr(kind, name, None) is getattr(object, name, None) for name in _HOW_MADE)
    return is_pythons and hasattr(value, "__dict__") and not hasattr(kind, "__slots__") and not isinstance(value, type)


_HOW_MADE = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")


def _class(value: Any, into: Taken) -> str:
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    into.classes[name] = type(value)
    return name


def as_bytes(taken: Taken) -> Tensor:
    """Return values as one row of bytes: the length of the JSON, the JSON, the tensors.

    Raises:
        NotSendableError: if these are too many.
    """
    num = sum(one.numel() * one.element_size() for one in taken.tensors)
    if num > MOST_BYTES:
        raise NotSendableError(f"it has {num >> 20} MiB, and at most {MOST_BYTES >> 20} MiB are sent")
    head = json.dumps(taken.shape).encode()
    parts = [torch.tensor([len(head)]).view(torch.uint8), torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    for one in taken.tensors:
        begin = sum(part.numel() for part in parts)
        flat = one.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        parts += [torch.zeros(-begin % _ALIGNED, dtype=torch.uint8), flat.view(torch.uint8)]
    return torch.cat(parts)


def from_bytes(row: Tensor, classes: Mapping[str, type]) -> Any:
    """Return what `as_bytes` was given, made anew: with tensors on the CPU, and objects of these classes.

    Raises:
        NotSendableError: if an object is of another class.
    """
    length = int(row[:8].view(torch.int64))
    shape = json.loads(row[8 : 8 + length].numpy().tobytes())
    return _Reader(row, 8 + length, classes).made(shape)


class _Reader:
    def __init__(self, row: Tensor, begin: int, classes: Mapping[str, type]) -> None:
        self._row = row
        self._place = begin
        self._classes = classes
        self._makers: Mapping[str, Callable[..., Any]] = {
            "plain": lambda value: value,
            "tensor": self._tensor,
            "array": lambda *shape: self._tensor(*shape).numpy(),
            "dict": self._items,
            "OrderedDict": lambda items: OrderedDict(self._items(items)),
            "list": self._list,
            "tuple": lambda shapes: tuple(self._list(shapes)),
            "deque": lambda most, shapes: deque(self._list(shapes), most),
            "named tuple": lambda name, shapes: self._class(name)(*self._list(shapes)),
            "object": self._object,
        }

    def made(self, shape: Sequence[Any]) -> Any:
        kind, *parts = shape
        return self._makers[kind](*parts)

    def _tensor(self, dtype: str, sizes: Sequence[int]) -> Tensor:
        kind = getattr(torch, dtype)
        begin = self._place + -self._place % _ALIGNED
        self._place = begin + math.prod(sizes) * kind.itemsize
        # A copy, as the model may change its inputs in place.
        return self._row[begin : self._place].clone().view(kind).reshape(sizes)

    def _list(self, shapes: Sequence[Any]) -> list[Any]:
        return [self.made(one) for one in shapes]

    def _items(self, items: Sequence[Any]) -> dict[Any, Any]:
        return {key: self.made(one) for key, one in items}

    def _class(self, name: str) -> type:
        if name not in self._classes:
            raise NotSendableError(f"this rank's batch has no {name}, and that of another rank has")
        return self._classes[name]

    def _object(self, name: str, items: Sequence[Any]) -> Any:
        made: Any = object.__new__(self._class(name))
        made.__dict__.update(self._items(items))
        return made
