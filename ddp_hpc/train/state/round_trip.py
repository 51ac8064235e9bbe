"""Finds out, once in an attempt, whether what would be saved would come back: before the first step of the model, after it of the optimizer.

The code that saves and the code that restores do it, in memory. No tensor of the optimizer is copied: bytes come back as they are.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.names import shorten_names
from ddp_hpc.train.engine.set_aside import device_for_copies, restore_after
from ddp_hpc.train.state import digests, optimizer_state, training_state
from ddp_hpc.train.state.optimizer_state import KeptByOptimizer, SavedTensor
from ddp_hpc.train.state.training_state import TrainingState, named_tensors, why_not_plain

_MOST_NAMED = 3


@torch.no_grad()
def check_loading(state: TrainingState) -> None:
    """Load what a model with saving or loading code of its own would save, once, over other values; afterwards the model is as it was."""
    model = state.model
    if training_state.loads_plainly(model):
        return
    trained = {id(one) for group in state.optimizer.param_groups for one in group["params"]}
    names = {name: one for name, one in model.named_parameters() if id(one) in trained}
    copies_on = device_for_copies([*named_tensors(model).values()] * 2, state.device)
    with restore_after(model, (), state.device, refused=[]):
        saved = {name: one.detach().to(copies_on or one.device, copy=True) for name, one in model.state_dict().items()}
        before = {name: one.detach().to(copies_on or one.device, copy=True) for name, one in names.items()}
        for one in names.values():
            one.detach().copy_(_as_bytes(one).bitwise_not().view(one.dtype).view(one.shape))  # all of its bits
        try:
            training_state.load(model, saved)
        except Exception as error:
            raise ConfigError(
                f"`Recipe.model` cannot load what its own `state_dict` gives ({type(error).__name__}: {error}), so no run could resume from a "
                "checkpoint of it. Have `state_dict` and `load_state_dict` take the same names."
            ) from error
        now = dict(model.named_parameters())
        lost = [
            name
            for name, one in before.items()
            if name not in now
            or (now[name].shape, now[name].dtype) != (one.shape, one.dtype)
            or not torch.equal(_as_bytes(now[name]), _as_bytes(one.to(state.device)))
        ]
    if lost:
        raise ConfigError(
            f"The weight {shorten_names([*map(repr, lost)], 1)} is trained, but does not come back: it has another value after `Recipe.model` loads its own `state_dict`, so each resume "
            "would change it. Have `state_dict` return it unchanged and `load_state_dict` set it; or do not train it (`requires_grad_(False)`)."
        )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def why_not_restored(state: TrainingState) -> str:
    """Say what would not come back from a checkpoint of now; empty if all would."""
    try:
        training_state.check(state)
        kept = state.kept_of_optimizer()
        return _shared_memory_problem(state, kept) or _gradients_left_problem(state) or _restore_problem(state, kept)
    except ConfigError as error:
        return str(error)


def _shared_memory_problem(state: TrainingState, kept: KeptByOptimizer) -> str:
    plain = ((name, one) for name, one in named_tensors(state.model).items() if one.numel() and not why_not_plain(one))
    owners = {one.untyped_storage().data_ptr(): name for name, one in plain}
    for name, one in kept.tensors.items():
        if one.numel() and (other := owners.setdefault(one.untyped_storage().data_ptr(), name)) != name:
            return (
                f"The optimizer's `{name}` and `{other}` share memory, so a resumed run would have two tensors. Keep one of them, or a copy "
                "(`clone`)."
            )
    return ""


def _gradients_left_problem(state: TrainingState) -> str:
    names = {one: name for name, one in state.model.named_parameters()}
    for parameter in (one for group in state.optimizer.param_groups for one in group["params"]):
        grad = parameter.grad
        if grad is not None and not grad.is_sparse and bool(grad.any()):
            return (
                f"The optimizer's `zero_grad` leaves the gradient of {names[parameter]!r}, to which the next step adds, but no checkpoint holds "
                "gradients. Have it clear all. To accumulate gradients, use `train.micro_batch_size`, or the optimizer's `state`."
            )
    return ""


def _restore_problem(state: TrainingState, kept: KeptByOptimizer) -> str:
    """Name what a restore would make otherwise; no tensor is copied, so types, shapes and places are compared."""
    content = json.loads(json.dumps({"type": type(state.optimizer).__name__, **kept.as_json()}))
    saved = {name: SavedTensor(one.shape, one.dtype) for name, one in kept.tensors.items()}
    back, _ = optimizer_state.state_to_fill(state.model, state.optimizer, content, saved, is_meta=True)
    for name, parameter in state.model.named_parameters():
        live = state.optimizer.state.get(parameter, {})
        for key in {**live, **back.get(parameter, {})}:
            if _comparison_key(live.get(key)) != _comparison_key(back[parameter].get(key)):
                return (
                    f"The optimizer's `state[{name}][{key!r}]` would not come back from a checkpoint as it is. Keep tensors, numbers and texts in "
                    "`state[parameter]`, under names, as the optimizers of `torch.optim` do."
                )
    return ""


def _comparison_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.stride(), value.requires_grad
    return type(value), repr(value)


def digests_to_compare(state: TrainingState) -> dict[str, int]:
    """Return a number for each thing that rank zero alone saves, though DDP does not keep it equal on all ranks."""
    attributes = state.kept_of_optimizer().attributes
    texts = {f"{name} of the optimizer": json.dumps(one, sort_keys=True) for name, one in attributes.items()}
    known = named_tensors(state.model)
    memory = {one.data_ptr() for one in known.values()}
    is_each_ranks = training_state.per_rank_predicate(state.model)
    saved = state.model.state_dict()
    unknown = [name for name in saved if not (name in known or is_each_ranks(name))]
    others = {name: saved[name] for name in unknown if saved[name].data_ptr() not in memory}
    found = {f"{name} of the model's `state_dict`": one for name, one in digests.digests_of_tensors(others).items()}
    return found | {name: zlib.crc32(text.encode()) for name, text in texts.items()}


def why_ranks_differ(reports: Iterable[Mapping[str, int]]) -> str:
    """Say what of `digests_to_compare` ranks do not have equal."""
    names = [f"`{name}`" for name in digests.differing_tensors([*reports])]
    return (
        f"The ranks do not have the same {shorten_names(names, _MOST_NAMED)}, but a checkpoint holds one value for all. Make it equal on all ranks, or make it a buffer, or "
        "return it from `get_extra_state`, which is saved for each rank."
    )
