"""What the training state is: which tensors and numbers a checkpoint holds, by name, and how they are put back.

Names: `model/WEIGHT`, `ema/WEIGHT`, `optimizer/WEIGHT/KEY`, `rank.R/rng.GENERATOR`, `rank.R/loss_meter`.
Parameters, their averages and the optimizer's state are the same on every rank, buffers are rank zero's (as in DDP),
generators and meters are each rank's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_hpc.errors import ConfigError
from ddp_hpc.train import rng
from ddp_hpc.train.data_order import Position

_MOST_NAMES = 5
"""Weights that a message names."""


class NamedTensor(NamedTuple):
    """A tensor of the training state, and the rank that has to write it (None: any, all have the same)."""

    name: str
    tensor: Tensor
    owner: int | None


@dataclass
class TrainingState:
    """Everything a resumed run needs to go on as if nothing had happened."""

    model: nn.Module
    """The user's own module, not its DDP wrapper."""
    optimizer: torch.optim.Optimizer
    device: torch.device
    rank: int
    world_size: int
    loss_meter: Tensor
    """Float32 scalar, this rank's: its part of the windows' mean losses, added up since the last log line."""
    loss_steps: int = 0
    """How many steps are in `loss_meter`."""
    scaler: torch.amp.GradScaler | None = None
    ema: nn.Module | None = None
    """`AveragedModel` of the model."""
    position: Position = Position()


def tensors(state: TrainingState) -> list[NamedTensor]:
    """Return this rank's view of the state's tensors; shared ones come in the same order on every rank."""
    return [*_weights("model", state.model), *_averages(state), *_optimizer_tensors(state), *_own_tensors(state)]


def check(state: TrainingState, dtypes: Container[torch.dtype]) -> None:
    """Find out before the first step whether the state can be saved and restored.

    Raises:
        ConfigError: where it cannot.
    """
    names = _parameter_names(state)
    for number, group in enumerate(state.optimizer.param_groups):
        outside = [parameter for parameter in group["params"] if parameter not in names]
        if outside:
            raise ConfigError(
                f"The optimizer trains a parameter of shape {tuple(outside[0].shape)} (in its group {number}) that is not "
                "in `Recipe.model`, so no checkpoint would hold it and the ranks would not exchange its gradients. "
                "Make it part of the model; for a loss with parameters: `model.criterion = criterion`."
            )
    for name, tensor, _ in tensors(state):
        if tensor.dtype not in dtypes or tensor.layout != torch.strided:
            raise ConfigError(
                f"`{name}` is a tensor of {tensor.dtype} and {tensor.layout}, which a checkpoint cannot hold. "
                "Keep it as another type, for instance as `torch.view_as_real` gives it."
            )
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ConfigError(
                f"`{name}` was made by `expand`: several of its elements share one place in memory, so it could not be "
                "restored. Register `tensor.clone()`."
            )
    numbers(state)


def numbers(state: TrainingState) -> dict[str, Any]:
    """Return the state that is not tensors, as JSON; the same on every rank."""
    plain = {
        f"{name}/{key}": value
        for name, entry in _optimizer_entries(state)
        for key, value in entry.items()
        if not isinstance(value, Tensor)
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state.optimizer.param_groups]
    return {
        "position": asdict(state.position),
        "loss_steps": state.loss_steps,
        "optimizer": {
            "type": type(state.optimizer).__name__,
            "groups": _as_json(groups, "the optimizer's groups"),
            "plain": _as_json(plain, "the optimizer"),
        },
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "ema_updates": None if state.ema is None else int(state.ema.n_averaged),  # type: ignore[arg-type]  # a buffer
    }


def restore(state: TrainingState, saved: Mapping[str, Tensor], plain: Mapping[str, Any], *, seed: int) -> None:
    """Put a checkpoint's tensors and numbers into the objects of `state`.

    `saved` holds CPU tensors by the names above. With another number of ranks the generators cannot be carried over;
    each is then seeded anew from (seed, step, rank), and rank zero takes over what all meters had added up. The optimizer's options are not read back: those of the
    configuration and the recipe hold, so that a change of them on resume takes effect.

    Raises:
        ConfigError: where the checkpoint is of another model or optimizer.
    """
    _load_weights(state.model, saved, "model")
    if state.ema is not None:
        averaged = state.ema.module if any(name.startswith("ema/") for name in saved) else None
        if averaged is not None:
            _load_weights(averaged, saved, "ema")  # type: ignore[arg-type]  # AveragedModel.module is a Module
            state.ema.n_averaged.fill_(plain["ema_updates"])  # type: ignore[operator]  # a buffer
        else:
            state.ema.module.load_state_dict(state.model.state_dict())  # type: ignore[union-attr]  # a Module
    _load_optimizer(state, saved, plain["optimizer"])
    if state.scaler is not None and plain["scaler"]:
        state.scaler.load_state_dict(plain["scaler"])
    state.position = Position(**plain["position"])
    own = f"rank.{state.rank}/"
    saved_ranks = {name.partition("/")[0] for name in saved if name.startswith("rank.")}
    if len(saved_ranks) == state.world_size:
        state.loss_meter.copy_(saved[f"{own}loss_meter"])
        generators = {name.removeprefix(f"{own}rng."): saved[name] for name in saved if name.startswith(f"{own}rng.")}
        rng.restore(generators, state.device)
    else:
        meters = [saved[f"{name}/loss_meter"] for name in sorted(saved_ranks)]
        state.loss_meter.copy_(torch.stack(meters).sum() if state.rank == 0 else torch.zeros(()))
        rng.seed_everything("rank", seed, state.position.step, state.rank)
    state.loss_steps = plain.get("loss_steps", 0)
    if "loss_steps" not in plain:  # an older checkpoint does not say what is in the meter
        state.loss_meter.zero_()


# --- weights ---------------------------------------------------------------------------------------------------------


def _weights(prefix: str, module: nn.Module) -> Iterator[NamedTensor]:
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise ConfigError(
                f"The model's state holds {name!r} of type {type(value).__name__}, but a checkpoint holds tensors. "
                "Register it as a buffer, or leave `get_extra_state` out."
            )
        yield NamedTensor(f"{prefix}/{name}", value, None if name in shared else 0)


def _averages(state: TrainingState) -> Iterator[NamedTensor]:
    if state.ema is not None:
        yield from _weights("ema", state.ema.module)  # type: ignore[arg-type]


def _load_weights(module: nn.Module, saved: Mapping[str, Tensor], prefix: str) -> None:
    found = {name.removeprefix(f"{prefix}/"): value for name, value in saved.items() if name.startswith(f"{prefix}/")}
    try:
        module.load_state_dict(found)
    except RuntimeError as error:
        raise ConfigError(
            f"The checkpoint is of another model: {differences(module.state_dict(), found) or error}. Undo the change of the "
            "recipe, start over with `ddp-hpc submit --fresh`, or give the run a new `name`."
        ) from error


def differences(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Return in which names and shapes `found` is not of the model that `own` is of; empty where it is."""
    shapes = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(own[name].shape)}"
        for name in sorted(own.keys() & found.keys())
        if own[name].shape != found[name].shape
    ]
    missing, unknown = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    parts = [_some("missing", missing), _some("unknown", unknown), _some("of another shape", shapes)]
    return "; ".join(filter(None, parts))


def _some(what: str, names: Sequence[str]) -> str:
    """Return the first names in words, and how many more there are."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{what}: {', '.join(names[:_MOST_NAMES])}{more}" if names else ""


# --- optimizer -------------------------------------------------------------------------------------------------------


def _parameter_names(state: TrainingState) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in state.model.named_parameters()}


def _optimizer_entries(state: TrainingState) -> Iterator[tuple[str, dict[str, Any]]]:
    names = _parameter_names(state)
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            yield names[parameter], state.optimizer.state.get(parameter, {})


def _optimizer_tensors(state: TrainingState) -> Iterator[NamedTensor]:
    for name, entry in _optimizer_entries(state):
        for key, value in entry.items():
            if isinstance(value, Tensor):
                yield NamedTensor(f"optimizer/{name}/{key}", value, None)


def _load_optimizer(state: TrainingState, saved: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    mine = type(state.optimizer).__name__
    if mine != plain["type"]:
        raise ConfigError(
            f"The checkpoint's optimizer is {plain['type']}, this one is {mine}. "
            "Undo the change of the optimizer, or give the run a new `name`."
        )
    entries: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in saved.items():
        if name.startswith("optimizer/"):
            parameter_name, _, key = name.removeprefix("optimizer/").rpartition("/")
            entries[parameter_name][key] = value
    for name, value in plain["plain"].items():
        parameter_name, _, key = name.rpartition("/")
        entries[parameter_name][key] = value
    names = _parameter_names(state)
    unknown = entries.keys() - set(names.values())
    if unknown:
        raise ConfigError(
            f"The checkpoint's optimizer has state of {min(unknown)!r}, which this model does not train. "
            "Undo the change of the recipe, or give the run a new `name`."
        )
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            entry = entries.get(names[parameter])
            if entry:
                state.optimizer.state[parameter] = {
                    key: _placed(value, key, parameter, group) if isinstance(value, Tensor) else value
                    for key, value in entry.items()
                }


def _placed(value: Tensor, key: str, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Put a state tensor where torch's optimizers keep it: beside the parameter, but `step` on the CPU unless fused."""
    on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
    placed = value.clone() if on_cpu else value.to(parameter.device, copy=True)
    if placed.shape == parameter.shape and placed.dim() == 4:
        placed = torch.empty_like(parameter, dtype=placed.dtype).copy_(placed)
    return placed


# --- what each rank has for itself -----------------------------------------------------------------------------------


def _own_tensors(state: TrainingState) -> Iterator[NamedTensor]:
    prefix = f"rank.{state.rank}"
    yield NamedTensor(f"{prefix}/loss_meter", state.loss_meter, state.rank)
    for name, value in rng.capture(state.device).items():
        yield NamedTensor(f"{prefix}/rng.{name}", value, state.rank)


def _as_json(value: Any, where: str) -> Any:
    """Check that `value` survives JSON unchanged; tuples become lists."""
    if isinstance(value, dict):
        return {str(key): _as_json(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item, where) for item in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"The state of {where} holds {value!r} of type {type(value).__name__}, but a checkpoint holds tensors, numbers "
        "and text. Use an optimizer of torch's shape."
    )
