"""What an optimizer keeps, by name: tensors, numbers and texts of each weight, and numbers in attributes of its own.

A tensor is `optimizer/WEIGHT/KEY`. An attribute is kept if it has changed since the optimizer was made: the others are the recipe's, and
a change of the recipe applies. All else is refused by name.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.checkpoints.shards import select_by_prefix
from ddp_hpc.train.engine.value_copies import is_constant
from ddp_hpc.train.state import group_options

Optimizer = torch.optim.Optimizer
Attributes = Mapping[str, str]
"""The attributes of an optimizer as text, to find out which have changed."""
_STRIDES_BY_LAYOUT: dict[tuple[torch.Size, tuple[int, ...]], tuple[int, ...]] = {}
"""Of a tensor like one of that shape and those strides."""


class SavedTensor(NamedTuple):
    """Shape and dtype of a tensor in a checkpoint."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Return a tensor on the CPU that it can be read into."""
        return torch.empty(self.shape, dtype=self.dtype)


@dataclass
class KeptByOptimizer:
    """What a checkpoint holds of an optimizer."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Any] = field(default_factory=dict)
    """Device and strides of tensors that are not where PyTorch's optimizers have them."""
    attributes: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return all but the tensors."""
        more = {"places": self.places, "attributes": self.attributes}
        return {"plain": self.plain, **{name: one for name, one in more.items() if one}}


def attributes(model: nn.Module, optimizer: Optimizer) -> Attributes:
    """Return an optimizer's own attributes as text."""
    weights = {id(one): name for name, one in (*model.named_parameters(), *model.named_buffers())}
    return {name: _text(one, name, weights) for name, one in vars(optimizer).items() if name not in _torch_attributes()}


@functools.cache
def _torch_attributes() -> frozenset[str]:
    """Return attributes that PyTorch's optimizers have, which keep nothing else there; schedulers replace `step`."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "_need_device_dtype_check_for_fused"}


def _text(value: Any, place: str, weights: Mapping[int, str]) -> str:
    if id(value) in weights:
        return f"the weight {weights[id(value)]}"
    if isinstance(value, nn.Module):
        value = [*value.parameters(), *value.buffers()]
    if type(value) in (list, tuple, dict):
        parts = [one for pair in value.items() for one in pair] if isinstance(value, dict) else value
        return f"{type(value).__name__}({', '.join(_text(one, place, weights) for one in parts)})"
    if type(value) is Tensor and value.numel() <= group_options.MOST_ELEMENTS:
        return str(group_options.encode_option(value, place))
    if isinstance(value, Optimizer) or not (callable(value) or is_constant(type(value))):
        raise _unsavable_error(place, value)
    return type(value).__name__ if callable(value) else repr(value)


def _unsavable_error(place: str, value: Any) -> ConfigError:
    more = f" ({value.dtype}, {value.layout})" if isinstance(value, Tensor) else ""
    return ConfigError(
        f"The optimizer has `{place}` of type {type(value).__name__}{more}, which no checkpoint would hold, so a resumed run would not give the "
        "same bits. Keep tensors, numbers and texts in `state[parameter]`, under names, as the optimizers of `torch.optim` do."
    )


def _outside_error(key: Any, state: Any) -> ConfigError:
    if isinstance(key, Tensor):
        return ConfigError(
            f"The optimizer keeps state of a tensor of shape {tuple(key.shape)} that is not, or no longer, a parameter of the model, so no "
            "checkpoint would hold it. Let the model keep the parameters that it has when the recipe is built, and the optimizer keep state of these."
        )
    return _unsavable_error(f"state[{key!r}]" if isinstance(key, str) else "state", state)


def kept_by_optimizer(model: nn.Module, optimizer: Optimizer, made: Attributes) -> KeptByOptimizer:
    """Return what a checkpoint holds of the optimizer; `made`: its attributes before any step."""
    named, found = dict(model.named_parameters()), KeptByOptimizer()
    ids = {*map(id, named.values())}
    outside = [key for key in dict[Any, Any](optimizer.state) if id(key) not in ids]
    if outside or optimizer.state is not optimizer.state:  # a property that makes it anew
        raise _outside_error(next(iter(outside), None), optimizer.state)
    group_of = _group_by_param(optimizer)
    for name, parameter in named.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            place = f"{name}/{key}"
            if type(key) is not str or "/" in key:
                raise _unsavable_error(f"state[{name}]` with the key `{key!r}", key)
            if value is None or isinstance(value, bool | int | float | str):
                found.plain[place] = value
                continue
            if type(value) is not Tensor or value.layout != torch.strided:
                raise _unsavable_error(f"state[{name}][{key!r}]", value)
            found.tensors[f"optimizer/{place}"] = value
            now = value.device.type, value.stride()
            if now != _usual_place(value.shape, key, parameter, group_of):
                found.places[place] = [now[0], [*now[1]]]
    texts = attributes(model, optimizer)
    for name in [name for name, text in texts.items() if text != made.get(name)]:
        found.attributes[name] = encoded = group_options.encode_option(getattr(optimizer, name), name)
        if _text(group_options.decode_option(encoded, next(model.parameters()).device), name, {}) != texts[name]:
            raise _unsavable_error(name, getattr(optimizer, name))
    return found


def _group_by_param(optimizer: Optimizer) -> dict[Tensor, dict[str, Any]]:
    return {parameter: group for group in optimizer.param_groups for parameter in group["params"]}


def _usual_place(
    shape: torch.Size, key: str, parameter: Tensor, group_of: Mapping[Tensor, Mapping[str, Any]]
) -> tuple[str, tuple[int, ...]]:
    """Return device and strides of what PyTorch's optimizers keep: on the parameter's device, but `step` on the CPU unless fused."""
    group = group_of.get(parameter, {})
    is_on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
    # In the memory layout of the parameter: fused kernels pair elements by address.
    strides = _strides_like(parameter) if shape == parameter.shape else torch.empty(shape, device="meta").stride()
    return "cpu" if is_on_cpu else parameter.device.type, strides


def _strides_like(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides that PyTorch gives to a tensor like this one; asked once for each layout, as a training waits for a save."""
    key = parameter.shape, parameter.stride()
    if key not in _STRIDES_BY_LAYOUT:
        _STRIDES_BY_LAYOUT[key] = torch.empty_like(parameter, device="meta").stride()
    return _STRIDES_BY_LAYOUT[key]


def state_to_fill(
    model: nn.Module,
    optimizer: Optimizer,
    content: Mapping[str, Any],
    saved: Mapping[str, SavedTensor],
    *,
    is_meta: bool = False,
) -> tuple[dict[Tensor, dict[str, Any]], dict[str, Tensor]]:
    """Return what a checkpoint has for the optimizer's `state`, whose JSON is `content`, and by name its tensors, still to be filled.

    They take no memory if `is_meta`.
    """
    refuse_other_optimizer(type(optimizer).__name__, content)
    if "odd" in content:
        raise _unfit_error("optimizer has state that this version of ddp_hpc cannot load", "version of ddp_hpc")
    named, group_of = dict(model.named_parameters()), _group_by_param(optimizer)
    state, into = defaultdict[Tensor, dict[str, Any]](dict), dict[str, Tensor]()
    for place, value in {**select_by_prefix("optimizer/", saved), **content["plain"]}.items():
        name, _, key = place.rpartition("/")
        if name not in named:
            there = f"optimizer has state of the parameter {name!r}, which this model does not have"
            raise _unfit_error(there, "recipe")
        if not isinstance(value, SavedTensor):
            state[named[name]][key] = value
        else:
            usual = _usual_place(value.shape, key, named[name], group_of)
            device, strides = content.get("places", {}).get(place, usual)
            device = "meta" if is_meta else named[name].device if device != "cpu" else "cpu"
            made = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=device)
            state[named[name]][key] = into[f"optimizer/{place}"] = made
    return state, into


def refuse_other_optimizer(mine: str, content: Mapping[str, Any]) -> None:
    """Refuse to continue from a checkpoint of another optimizer, whose JSON is `content`."""
    if mine != content["type"]:
        raise _unfit_error(f"optimizer is {content['type']}, but this run's is {mine}", "optimizer")


def _unfit_error(found: str, what: str) -> ConfigError:
    return ConfigError(
        f"The checkpoint's {found}. Undo the change of the {what}, start over with `ddp-hpc submit --fresh`, or give the run a new `name`."
    )
