"""Values of many types as JSON that says the exact types, beside the tensors in them; and back."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError

PREFIX = "optimizer.odd/"
"""Of the names of tensors that are in such values."""
_SEQUENCES = {"list": list, "tuple": tuple, "deque": deque}
_DICTS = {"dict": dict, "OrderedDict": OrderedDict}
Make = Callable[[str, Mapping[str, Any]], Tensor]
"""Makes a tensor by its name, on the `device`, with the `strides`, and `complex` or not, as the encoder has noted."""


class Encoder:
    """Encodes values of one training; a tensor that is in several of them is one tensor in all again."""

    def __init__(self, model: nn.Module) -> None:
        self._models = {id(one): name for name, one in named_tensors(model).items()}
        self.tensors: dict[str, Tensor] = {}
        """By name what a checkpoint has to hold besides the JSON."""
        self._names: dict[int, str] = {}

    def add(self, value: Tensor, name: str) -> bool:
        """Give a tensor a name; return whether it had none, in the model or here."""
        key = id(value)
        if key in self._names or key in self._models:
            return False
        self.tensors[name], self._names[key] = value, name
        return True

    def _noted(self, value: Tensor) -> dict[str, Any]:
        """Return what stands for a tensor that has a name."""
        name = self._names[id(value)]
        note: dict[str, Any] = {"tensor": name, "device": value.device.type}
        if value.dtype == torch.complex128:  # which safetensors files cannot hold
            self.tensors[name], note["complex"] = torch.view_as_real(value), True
        if not self.tensors[name].is_contiguous():
            note["strides"] = [*self.tensors[name].stride()]
        return note

    def encoded(self, value: Any, place: str) -> Any:  # noqa: PLR0911  one for each kind
        """Return a value as JSON.

        Raises:
            ConfigError: if its type cannot be kept; `place` names it.
        """
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is deque:
            return {"deque": self._all(value, place), "longest": value.maxlen}
        if kind in _SEQUENCES.values():
            return {kind.__name__: self._all(value, place)}
        if kind in _DICTS.values():
            pairs = [
                [self._key(key, place), self.encoded(one, f"{place}[{self._shown(key)}]")] for key, one in value.items()
            ]
            return {kind.__name__: pairs}
        if id(value) in self._models:
            return {"of_model": self._models[id(value)]}
        if id(value) in self._names:
            return self._noted(value)
        if kind is Tensor and value.layout == torch.strided and not (value.is_quantized or value.is_meta):
            name = f"{PREFIX}{place}"
            while name in self.tensors:
                name += "'"
            self.add(value, name)
            return self._noted(value)
        kept = f"{kind.__name__} ({value.dtype}, {value.layout})" if isinstance(value, Tensor) else kind.__name__
        raise ConfigError(
            f"The optimizer has `{place}` of type {kept}, but a checkpoint can hold only tensors, numbers and text, and lists, "
            "tuples and dicts of these. Use an optimizer that keeps its state in these, as those of `torch.optim` do."
        )

    def _all(self, values: Any, place: str) -> list[Any]:
        return [self.encoded(one, f"{place}[{number}]") for number, one in enumerate(values)]

    def _key(self, key: Any, place: str) -> Any:
        if isinstance(key, Tensor) and id(key) not in self._models:
            raise ConfigError(
                f"The optimizer has `{place}` with a key that is a tensor of shape {[*key.shape]}, but not a weight of `Recipe.model`, so no "
                "checkpoint could say which. Use the model's own weights as keys."
            )
        return self.encoded(key, f"{place}, key")

    def _shown(self, key: Any) -> str:
        return self._models.get(id(key), repr(key))


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def decoded(encoded: Any, make: Make, models: Mapping[str, Tensor]) -> Any:
    """Return what was encoded; its tensors are made, or are those of the model."""
    if not isinstance(encoded, dict):
        return encoded
    if "of_model" in encoded:
        return models[encoded["of_model"]]
    if "tensor" in encoded:
        return make(encoded["tensor"], encoded)
    for name, kind in _DICTS.items():
        if name in encoded:
            return kind((decoded(key, make, models), decoded(one, make, models)) for key, one in encoded[name])
    if "deque" in encoded:
        return deque((decoded(one, make, models) for one in encoded["deque"]), encoded["longest"])
    (name,) = encoded
    return _SEQUENCES[name](decoded(one, make, models) for one in encoded[name])


def unlike(live: Any, back: Any, place: str, pairs: dict[int, int]) -> str:
    """Say what a value that came back has unlike the live one: types, keys, shapes, or which tensors are the same one; empty if nothing.

    `pairs` has what each live tensor came back as.
    """
    if isinstance(live, Tensor):
        kinds = [(one.shape, one.dtype, one.requires_grad) for one in (live, back) if isinstance(one, Tensor)]
        is_alike = len(kinds) == 2 and kinds[0] == kinds[1] and pairs.setdefault(id(live), id(back)) == id(back)
        return "" if is_alike else place
    if isinstance(live, (list, tuple, deque)):
        if type(live) is not type(back) or len(live) != len(back):
            return place
        return _first(
            unlike(*both, f"{place}[{number}]", pairs) for number, both in enumerate(zip(live, back, strict=True))
        )
    if isinstance(live, dict):
        if not isinstance(back, dict) or {(type(key), key) for key in live} != {(type(key), key) for key in back}:
            return place
        return _first(
            unlike(one, back[key], f"{place}[{key if isinstance(key, str) else '...'}]", pairs)
            for key, one in live.items()
        )
    is_alike = isinstance(live, type(back)) and (live == back or (live != live and back != back))  # noqa: PLR0124  NaN
    return "" if is_alike else place


def _first(found: Any) -> str:
    return next(filter(None, found), "")
