"""What an optimizer keeps, by name: of each weight, in attributes of its own, and in optimizers that it holds.

A tensor, number or text that PyTorch's own optimizers could have is `optimizer/WEIGHT/KEY`. All else is odd: JSON says where it
belongs and of which type it is, beside the tensors in it (see `odd_values`). So it is with attributes that have changed since the
optimizer was made: those that have not are the recipe's, and a change of the recipe applies.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.engine.kept_values import GENERATORS, is_constant, set_state, state_of
from ddp_hpc.train.state.odd_values import PREFIX, Encoder, decoded, named_tensors, unlike

_LARGE_BYTES = 4 << 20
"""From this size on, a tensor is asked for in large pages (2 MiB); asking for many small ones would use up the kernel's table of mappings."""

Optimizer = torch.optim.Optimizer
Attributes = Mapping[str, Mapping[str, str | None]]
"""Of each optimizer the attributes as text, None where that cannot say whether one has changed."""


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

    tensors: dict[str, Tensor]
    plain: dict[str, Any] = field(default_factory=dict)
    odd: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Attributes that it cannot hold."""


class Restored(NamedTuple):
    """What an optimizer had, in tensors that are still to be filled."""

    states: dict[str, dict[Any, Any]]
    """The `state` of each optimizer."""
    attributes: dict[str, dict[str, Any]]

    def put(self, optimizer: Optimizer) -> None:
        """Give the optimizers their `state` and attributes, once the tensors are filled."""
        for path, one in optimizers(optimizer).items():
            _state(one).update(self.states.get(path, {}))
            for name, value in self.attributes.get(path, {}).items():
                _set(one, name, value)


# --- which optimizers, which attributes ------------------------------------------------------------------------------


def optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizer, under an empty name, and those that it holds, as Lookahead and pairs do, under the names of its attributes."""
    found, begun = {"": optimizer}, [("", optimizer)]
    for path, holder in begun:
        for name, value in vars(holder).items():
            for number, one in enumerate(_held(value)):
                if not any(one is known for known in found.values()):
                    found[f"{path}{name}.{number}."] = one
                    begun.append((f"{path}{name}.{number}.", one))
    return found


def _held(value: Any) -> list[Optimizer]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return [one for one in values if isinstance(one, Optimizer)]


def groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of all these optimizers, each once."""
    return [*{id(one): one for each in optimizers(optimizer).values() for one in each.param_groups}.values()]


def _state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return an optimizer's `state`; nothing of one that is a property and makes it anew, from what other optimizers have."""
    found: dict[Any, Any] = getattr(optimizer, "state", {})
    return found if getattr(optimizer, "state", None) is found else {}


def _states(optimizer: Optimizer) -> dict[str, dict[Any, Any]]:
    """Return the `state` of all these optimizers, each once."""
    found: dict[str, dict[Any, Any]] = {}
    for path, one in optimizers(optimizer).items():
        if not any(_state(one) is known for known in found.values()):
            found[path] = _state(one)
    return found


@functools.cache
def _of_pytorch() -> frozenset[str]:
    """Return attributes that PyTorch's optimizers have, which keep nothing else there; schedulers replace `step`."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)]))) | {"step", "_need_device_dtype_check_for_fused"}


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        if name not in _of_pytorch() and not _held(value) and value is not _state(optimizer):
            kept = (
                state_of(value)
                if isinstance(value, GENERATORS)
                else dict(value)
                if isinstance(value, defaultdict)
                else value
            )
            yield name, kept


def attributes_as_made(model: nn.Module, optimizer: Optimizer) -> Attributes:
    """Return the attributes of all these optimizers, to find out later which have changed."""
    return {
        path: {name: _text(model, value) for name, value in _attributes(one)}
        for path, one in optimizers(optimizer).items()
    }


def _text(model: nn.Module, value: Any) -> str | None:
    encoder = Encoder(model)
    try:
        text = json.dumps(encoder.encoded(value, ""))
    except ConfigError:
        return None
    return None if encoder.tensors else text


def _set(holder: Any, name: str, value: Any) -> None:
    """Set an attribute; what it has stays the same object where it can, since others may hold it, too."""
    old = getattr(holder, name, None)
    if isinstance(old, GENERATORS):
        set_state(old, value)
    elif isinstance(old, Tensor) and isinstance(value, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            old.copy_(value)
    elif isinstance(old, dict) and isinstance(value, dict):
        old.clear()
        old.update(value)
    elif isinstance(old, list) and isinstance(value, list):
        old[:] = value
    else:
        setattr(holder, name, value)


# --- to a checkpoint -------------------------------------------------------------------------------------------------


def kept(model: nn.Module, optimizer: Optimizer, made: Attributes) -> KeptByOptimizer:
    """Return what a checkpoint holds of the optimizer; `made`: its attributes before any step.

    Raises:
        ConfigError: if it has something that a checkpoint cannot hold.
    """
    encoder = Encoder(model)
    found = KeptByOptimizer(encoder.tensors)
    states = _states(optimizer)
    state = [*_plain_and_odd(model, optimizer, encoder, found.plain)]
    inner = {path: encoder.encoded(dict(one), f"{path}state") for path, one in states.items() if path and one}
    attributes: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, one in optimizers(optimizer).items():
        for name, value in _attributes(one):
            text = _text(model, value)
            if text is not None and text == made.get(path, {}).get(name):
                continue
            try:
                Encoder(model).encoded(value, "")  # if it raises, no tensor of it has a name
                attributes[path][name] = encoder.encoded(value, f"{path}{name}")
            except ConfigError:
                if not callable(value) and not is_constant(type(value)):
                    found.left_out.append(f"{path}{name}")
    parts = {"state": state, "inner": inner, "attributes": dict(attributes)}
    found.odd = {name: one for name, one in parts.items() if one}
    return found


def _plain_and_odd(
    model: nn.Module, optimizer: Optimizer, encoder: Encoder, plain: dict[str, Any]
) -> Iterator[list[Any]]:
    """Name the tensors and fill `plain`; yield the odd rest, as pairs of a key of `state` and what is odd under it."""
    state, names = _state(optimizer), {one: name for name, one in model.named_parameters()}
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in [*group_of, *(one for one in names if one not in group_of)]:
        if parameter not in names:
            raise ConfigError(
                f"The optimizer has a parameter of shape {list(parameter.shape)} that is not in `Recipe.model`, so no checkpoint could "
                "hold it. Make it a part of the model."
            )
        entry, odd = state.get(parameter, {}), {}
        for key, value in entry.items() if type(entry) is dict else ():
            place = f"{names[parameter]}/{key}"
            is_plain = type(key) is str and "/" not in key
            if is_plain and isinstance(value, Tensor):
                if _is_usual(value, key, parameter, group_of) and encoder.add(value, f"optimizer/{place}"):
                    continue
            elif is_plain and (value is None or isinstance(value, bool | int | float | str)):
                plain[place] = value
                continue
            odd[key] = value
        if odd or type(entry) is not dict:
            yield [{"of_model": names[parameter]}, encoder.encoded(odd or entry, names[parameter])]
    for key, value in state.items():
        if key not in names:
            yield [encoder.encoded(key, "state, key"), encoder.encoded(value, f"state[{key!r}]")]


def _is_usual(value: Tensor, key: str, parameter: Tensor, group_of: Mapping[Tensor, Mapping[str, Any]]) -> bool:
    """Tell whether a tensor lies where a restored one of its name is made."""
    if type(value) is not Tensor or value.dtype == torch.complex128 or value.layout != torch.strided:
        return False
    device, like = _usual_place(value.shape, key, parameter, group_of.get(parameter, {}))
    if value.device != device:
        return False
    if like is None or value.stride() == like.stride():
        return value.is_contiguous() or like is not None
    return value.stride() == torch.empty_like(like, device="meta").stride()


def _usual_place(
    shape: torch.Size, key: str, parameter: Tensor, group: Mapping[str, Any]
) -> tuple[torch.device, Tensor | None]:
    """Return where PyTorch's optimizers keep a tensor: on the parameter's device, but `step` on the CPU unless fused; and whose layout it has."""
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return torch.device("cpu"), None
    # In the memory layout of the parameter: fused kernels pair elements by address.
    return parameter.device, parameter if shape == parameter.shape else None


# --- from a checkpoint -----------------------------------------------------------------------------------------------


class TensorsToFill:
    """The tensors that are made to be filled, each once; on the device `meta`, if none shall take memory."""

    def __init__(self, saved: Mapping[str, SavedTensor], device: torch.device, *, is_meta: bool = False) -> None:
        self._saved = saved
        self._device = device
        self._is_meta = is_meta
        self._made: dict[str, Tensor] = {}
        self.into: dict[str, Tensor] = {}
        """By name, where to read them."""

    def usual(self, name: str, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Make a tensor where PyTorch's optimizers have it."""
        shape, dtype = self._saved[name]
        device, like = _usual_place(shape, key, parameter, group)
        device = torch.device("meta") if self._is_meta else device
        if like is not None:
            return self._noted(name, torch.empty_like(like, dtype=dtype, device=device))
        return self._noted(name, torch.empty(shape, dtype=dtype, device=device))

    def odd(self, name: str, note: Mapping[str, Any]) -> Tensor:
        """Make a tensor where it was."""
        if name in self._made:
            return self._made[name]
        shape, dtype = self._saved[name]
        device = "meta" if self._is_meta else "cpu" if note["device"] == "cpu" else self._device
        one = torch.empty(shape, dtype=dtype, device=device)
        if "strides" in note:
            one = torch.empty_strided(shape, note["strides"], dtype=dtype, device=device)
        self._noted(name, one)
        if note.get("complex"):
            self._made[name] = torch.view_as_complex(one)
        return self._made[name]

    def _noted(self, name: str, one: Tensor) -> Tensor:
        if one.device.type == "cpu" and one.nbytes >= _LARGE_BYTES:
            _ask_for_large_pages(one)
        self._made[name] = self.into[name] = one
        return one


def _ask_for_large_pages(one: Tensor) -> None:
    """Ask Linux to make a new tensor of large pages: to make it of small ones takes longer than to read and verify its bytes."""
    begin, end = -(-one.data_ptr() // mmap.PAGESIZE), (one.data_ptr() + one.nbytes) // mmap.PAGESIZE
    with suppress(AttributeError):  # not Linux
        size = ctypes.c_size_t((end - begin) * mmap.PAGESIZE)
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin * mmap.PAGESIZE), size, mmap.MADV_HUGEPAGE)


def refuse_other_optimizer(mine: str, content: Mapping[str, Any]) -> None:
    """Refuse to continue from a checkpoint of another optimizer, whose JSON is `content`.

    Raises:
        ConfigError: if it is another one.
    """
    if mine != content["type"]:
        raise _of_another(f"optimizer is {content['type']}, but this run's is {mine}", "optimizer")


def restored(
    model: nn.Module,
    optimizer: Optimizer,
    content: Mapping[str, Any],
    made: TensorsToFill,
    saved: Mapping[str, SavedTensor],
) -> Restored:
    """Return what a checkpoint has for the optimizer, whose JSON is `content`.

    Raises:
        ConfigError: if it is of another optimizer or model.
    """
    refuse_other_optimizer(type(optimizer).__name__, content)
    named = dict(model.named_parameters())
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    state: dict[Any, Any] = defaultdict(dict)
    for place, value in [
        *((name.removeprefix("optimizer/"), one) for name, one in saved.items() if name.startswith("optimizer/")),
        *content["plain"].items(),
    ]:
        name, _, key = place.rpartition("/")
        if name not in named:
            raise _of_another(
                f"optimizer has state of the parameter {name!r}, which this model does not have", "recipe"
            )
        parameter = named[name]
        is_tensor = isinstance(value, SavedTensor)
        state[parameter][key] = (
            made.usual(f"optimizer/{place}", key, parameter, group_of.get(parameter, {})) if is_tensor else value
        )
    odd, models, paths = content.get("odd", {}), named_tensors(model), optimizers(optimizer)
    for path in {**odd.get("inner", {}), **odd.get("attributes", {})}:
        if path not in paths:
            raise _of_another(f"optimizer holds another one in {path!r}, which this run's does not", "optimizer")
    for encoded_key, encoded_value in odd.get("state", []):
        key, value = (decoded(one, made.odd, models) for one in (encoded_key, encoded_value))
        state[key] = {**state[key], **value} if isinstance(value, dict) and key in state else value
    inner = {path: decoded(one, made.odd, models) for path, one in odd.get("inner", {}).items()}
    attributes = {
        path: {name: decoded(one, made.odd, models) for name, one in each.items()}
        for path, each in odd.get("attributes", {}).items()
    }
    return Restored({"": dict(state), **inner}, attributes)


def _of_another(found: str, what: str) -> ConfigError:
    return ConfigError(
        f"The checkpoint's {found}. Undo the change of the {what}, start over with `ddp-hpc submit --fresh`, or give the run a new `name`."
    )


# --- whether it would come back --------------------------------------------------------------------------------------


def why_not_restored(model: nn.Module, optimizer: Optimizer, found: KeptByOptimizer) -> str:
    """Say what of an optimizer would not come back from a checkpoint, of which `found` is what it would hold; empty if all would.

    No tensor is copied: bytes come back as they are, so their names, types, shapes and identities are compared.
    """
    if overlapping := _overlapping(found.tensors, model):
        return f"The optimizer's {overlapping} share memory, so a resumed run would have two tensors. Keep one of them, or a copy (`clone`)."
    left = [name for name, one in model.named_parameters() if one.grad is not None]
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    if any(bool(one.grad.any()) for one in trained if one.grad is not None and not one.grad.is_sparse):
        return (
            f"The optimizer's `zero_grad` leaves the gradient of {left[0]!r}, to which the next step adds, but no checkpoint holds gradients. "
            "Clear them there, and add up gradients with `train.micro_batch_size`, or in the optimizer's `state`."
        )
    content = json.loads(json.dumps({"type": type(optimizer).__name__, "plain": found.plain, "odd": found.odd}))
    saved = {name: SavedTensor(one.shape, one.dtype) for name, one in found.tensors.items()}
    back = restored(model, optimizer, content, TensorsToFill(saved, torch.device("meta"), is_meta=True), saved)
    pairs: dict[int, int] = {}
    for path, each in _states(optimizer).items():
        if place := unlike(_filled(each), _filled(back.states.get(path, {})), f"{path}state", pairs):
            return _not_back(place)
    for path, one in optimizers(optimizer).items():
        values = dict(_attributes(one))
        for name, value in back.attributes.get(path, {}).items():
            if place := unlike(values[name], value, f"{path}{name}", pairs):
                return _not_back(place)
    shown = [value for entry in optimizer.state.values() if isinstance(entry, dict) for value in entry.values()]
    if any(isinstance(one, Tensor) and id(one) not in pairs for one in shown):
        return _not_back("state")
    return ""


def _filled(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: one for key, one in state.items() if not isinstance(one, dict) or one}


def _not_back(place: str) -> str:
    return (
        f"The optimizer's `{place}` would not come back from a checkpoint as it is: a resumed run would have another type, other keys, or two "
        "tensors in place of one. Keep tensors, numbers and text in `state[parameter]`, under names, as the optimizers of `torch.optim` do."
    )


def _overlapping(tensors: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return the names of two tensors, one of them the optimizer's, of which one has memory of the other; empty without such."""
    named = {**{name: one.detach() for name, one in named_tensors(model).items()}, **tensors}
    spans = sorted(
        (
            one.data_ptr(),
            one.data_ptr()
            + 1
            + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
            * one.element_size(),
            name,
        )
        for name, one in named.items()
        if one.layout == torch.strided
        and one.numel()
        and not one.is_meta
        and type(one).__torch_dispatch__ is Tensor.__torch_dispatch__
    )
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end and (name in tensors or other in tensors):
            return f"`{name}` and `{other}`".replace(PREFIX, "")
    return ""
