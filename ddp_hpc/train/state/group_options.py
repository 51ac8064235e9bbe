"""The options that an optimizer writes into its parameter groups itself, and how a checkpoint keeps them.

Many optimizers outside `torch.optim` count steps or adapt numbers there (`step`, `d`, `weight_sum`). What the recipe and the
configuration set is not kept: on a resume, what they set then applies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.base.errors import ConfigError

Groups = Sequence[Mapping[str, Any]]
"""An optimizer's `param_groups`."""

_EXCLUDED_OPTIONS = frozenset({"params", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"})
"""Never the optimizer's own: the loop and schedulers set the learning rate, the last four only choose the kernels."""

_GONE = {"gone": True}
"""Stands for an option that the optimizer has deleted."""
MOST_ELEMENTS = 1024
"""How many elements an option may have that is a tensor: it is kept in the manifest."""


def options_as_text(groups: Groups) -> list[dict[str, str | None]]:
    """Return each group's options as text, to find out later which the optimizer has changed; None where it is of another type."""
    return [{key: _text_or_none(value) for key, value in _candidates(group).items()} for group in groups]


def changed_options(groups: Groups, made: Sequence[Mapping[str, str | None]]) -> list[dict[str, Any]]:
    """Return, for each group, the options that were changed or added since `options_as_text`, as JSON can hold them to the bit.

    The list is empty if there are none. It is the same on every rank, as the options are.
    """
    found: list[dict[str, Any]] = []
    for group, before in zip(groups, made, strict=False):  # a group that came later is the recipe's
        now = {key: encode_option(value, key) for key, value in _candidates(group).items()}
        gone = dict.fromkeys(before.keys() - group.keys(), _GONE)
        found.append({**{key: value for key, value in now.items() if _as_text(value) != before.get(key)}, **gone})
    return found if any(found) else []


def check(groups: Groups, kept: Sequence[Mapping[str, Any]]) -> None:
    """Find out whether `restore_options` can be called."""
    if kept and len(kept) != len(groups):
        names = sorted({key for options in kept for key in options})
        raise ConfigError(
            f"The checkpoint's optimizer has {len(kept)} parameter groups, in which it keeps {', '.join(names)}, but this run's "
            f"has {len(groups)}. Undo the change of the groups, start over with `ddp-hpc submit --fresh`, or give the run a new "
            "`name`."
        )


@torch.no_grad()
def restore_options(groups: Sequence[dict[str, Any]], kept: Sequence[Mapping[str, Any]], device: torch.device) -> None:
    """Set the options that `changed_options` returned. A tensor comes to the device of the one it replaces, else to where it was saved."""
    own = [dict(group) for group in groups]
    for group, options in zip(groups, kept, strict=False):
        for key, encoded in options.items():
            if encoded == _GONE:
                group.pop(key, None)
                continue
            value, old = decode_option(encoded, device), group.get(key)
            if not isinstance(value, Tensor) or not isinstance(old, Tensor):
                group[key] = value
                continue
            # Groups may share one tensor, and the optimizer may hold it besides: fill it, unless groups need different values.
            sharers = [number for number, one in enumerate(own) if one.get(key) is old]
            is_alike = (old.shape, old.dtype) == (value.shape, value.dtype)
            if is_alike and all(kept[number].get(key) == encoded for number in sharers):
                old.copy_(value)
            else:
                group[key] = value.to(old.device)


def options_for_manifest(value: Any) -> Any:
    """Return options as the manifest shows them: tensors as numbers, tuples as lists."""
    if isinstance(value, dict):
        return {str(key): options_for_manifest(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [options_for_manifest(one) for one in value]
    if isinstance(value, Tensor) and value.numel() <= MOST_ELEMENTS:
        return value.item() if value.numel() == 1 else value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = f"a tensor of {value.numel()} elements" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    raise ConfigError(
        f"An option of the optimizer is {kind}, but a checkpoint can hold only numbers, text and tensors of at most {MOST_ELEMENTS}. "
        "Keep a tensor in `optimizer.state`, beside the parameter that it belongs to."
    )


def _candidates(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _EXCLUDED_OPTIONS}


def _as_text(encoded: Any) -> str:
    """Return a text that differs wherever types or bits do: 1, 1.0 and True, 0.0 and -0.0."""
    return json.dumps(encoded, sort_keys=True)


def _text_or_none(value: Any) -> str | None:
    try:
        return _as_text(encode_option(value, ""))
    except ConfigError:  # whether that matters is found out when it is to be saved
        return None


def encode_option(value: Any, key: str) -> Any:
    """Return an option as JSON; numbers, text and None stand for themselves, all else is in a dict that says what it is."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [encode_option(one, key) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_option(name, key), encode_option(one, key)] for name, one in value.items()]}
    if isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return {
            "tensor": plain.view(torch.uint8).numpy().tobytes().hex(),
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [*value.shape],
            "device": value.device.type,
        }
    raise ConfigError(
        f"The optimizer's option `{key}` has {value!r} of type {type(value).__name__}, but a checkpoint can hold only tensors, "
        "numbers and text."
    )


def decode_option(encoded: Any, device: torch.device) -> Any:
    """Return what `encode_option` was given; a tensor that was not on the CPU comes to `device`."""
    if not isinstance(encoded, dict):
        return encoded
    if "tensor" in encoded:
        value = torch.empty(encoded["shape"], dtype=getattr(torch, encoded["dtype"]))
        if value.numel():
            content = torch.frombuffer(bytearray.fromhex(encoded["tensor"]), dtype=torch.uint8)
            value.view(-1).view(torch.uint8).copy_(content)
        return value if encoded["device"] == "cpu" else value.to(device)
    if "dict" in encoded:
        return {decode_option(name, device): decode_option(one, device) for name, one in encoded["dict"]}
    if "tuple" in encoded:
        return tuple(decode_option(one, device) for one in encoded["tuple"])
    return [decode_option(one, device) for one in encoded["list"]]
