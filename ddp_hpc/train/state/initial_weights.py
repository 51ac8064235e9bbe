"""Loads the weights that a run starts with (`train.init_from`), from a file or a checkpoint of another run."""

from __future__ import annotations

import logging
import math
import os
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, UnreadableError
from ddp_hpc.base.patience import is_there
from ddp_hpc.run.checkpoints import checkpoint_names, checkpoint_store
from ddp_hpc.run.checkpoints.shards import select_by_prefix
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.state.restore import read_with_prefix, to_torch
from ddp_hpc.train.state.training_state import TrainingState, difference_text, why_not_plain

log = logging.getLogger(__name__)

_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
"""Prefixes that DDP and `torch.compile` add to names."""
_NESTED_KEYS = ("state_dict", "model_state_dict", "model")
"""Names under which training scripts store the weights in a file that holds more than weights."""


def take_initial_weights(spec: RunSpec, state: TrainingState, group: Group, on_progress: Callable[[], object]) -> None:
    """Load the weights that `train.init_from` names into the model, and begin its average as a copy; call at step 0 only."""
    if spec.train.init_from is not None:
        _load(spec, state, group, on_progress)
    elif state.ema is not None and state.world_size > 1:
        # It was made of this rank's own weights, before DDP sent rank zero's to all ranks.
        own, theirs = (chain(one.parameters(), one.buffers()) for one in (state.ema.module, state.model))
        with torch.no_grad():
            for average, weight in zip(own, theirs, strict=True):
                average.copy_(weight)


def _load(spec: RunSpec, state: TrainingState, group: Group, on_progress: Callable[[], object]) -> None:
    # Rank zero alone reads, and sends the others what fits: thousands of ranks that read one file wait for the file system, and
    # the other run may commit a newer checkpoint at this very moment.
    fitting: dict[str, Tensor] = {}
    offer: dict[str, Any] = {}

    def report_progress() -> None:
        group.store.heartbeat("init_from")
        on_progress()

    if group.rank_info.is_rank_zero:
        try:
            source = find_weights(str(spec.train.init_from), runs_dir=spec.path.parent)
            found = _read(source, group, report_progress)
            fitting, misfits = _fit_weights(source, found, state.model.state_dict(), is_strict=spec.train.init_strict)
            tensors = {name: (str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in fitting.items()}
            offer = {"found": f"{source}{f' ({misfits})' if misfits else ''}", "tensors": tensors}
        except (ConfigError, UnreadableError) as error:
            offer = {"refusal": [type(error).__name__, str(error)]}
        except (OSError, ValueError) as error:  # of the search for the file; a name with a zero byte is a ValueError
            offer = {"refusal": [UnreadableError.__name__, _unreadable_message(spec.train.init_from, error)]}
    offer = group.broadcast_through_store("init_from", offer, on_heartbeat=on_progress)
    if "refusal" in offer:
        kind, text = offer["refusal"]
        group.wait_until_all_read("init_from/refused")
        raise (ConfigError if kind == ConfigError.__name__ else UnreadableError)(text)
    state.model.load_state_dict(_broadcast_weights(fitting, offer["tensors"], group), strict=False)
    if state.ema is not None:
        state.ema.module.load_state_dict(state.model.state_dict())
    log.info("loaded %d of %d weights from %s", len(offer["tensors"]), len(state.model.state_dict()), offer["found"])


def _fit_weights(
    source: Path, found: dict[str, Tensor], own: Mapping[str, Tensor], *, is_strict: bool
) -> tuple[dict[str, Tensor], str]:
    """Return the weights in a file or checkpoint that fit the model, and how the others differ."""
    for prefix in _WRAPPER_PREFIXES:
        if all(name.startswith(prefix) for name in found):
            found = select_by_prefix(prefix, found)
    for name in own:
        one = found.get(name)
        if one is not None and (why_not_plain(one) or type(one) not in (Tensor, nn.Parameter)):
            raise ConfigError(
                f"`train.init_from` is {str(source)!r}, but its weight {name!r} is sparse, nested, quantised, distributed or without values. "
                "Write it as a plain dense tensor: `to_dense()`, `dequantize()` or `full_tensor()` make one."
            )
    names = [name for name in own if name in found and own[name].shape == found[name].shape]
    # PyTorch cannot view a tensor as bytes while it is conjugated or negated by a mark alone.
    fitting = {name: found[name].detach().resolve_conj().resolve_neg() for name in names}
    misfits = difference_text(own, found)
    if misfits and is_strict:
        raise ConfigError(
            f"`train.init_from` is {str(source)!r}, but its weights are not those of the model: {misfits}. "
            "Name weights of this model, or set `train.init_strict=false` to take those that fit."
        )
    if not fitting:
        raise ConfigError(
            f"`train.init_from` is {str(source)!r}, but none of its weights fits the model: {misfits}. Name a file or run with weights of this model."
        )
    return fitting, misfits


def _broadcast_weights(
    read: Mapping[str, Tensor], tensors: Mapping[str, tuple[str, Sequence[int]]], group: Group
) -> dict[str, Tensor]:
    """Return the tensors of rank zero, by name with dtype and shape, in each rank's host memory; one after the other is on the device."""
    if group.rank_info.world_size == 1:
        return dict(read)
    received = {}
    for name, (dtype, shape) in tensors.items():
        # As bytes: gloo and NCCL do not know all of PyTorch's dtypes.
        if read:
            dist.broadcast(read[name].contiguous().reshape(-1).view(torch.uint8).to(group.device), 0)
            received[name] = read[name]  # not a second copy of the model
        else:
            kind: torch.dtype = getattr(torch, dtype)
            sent = torch.empty(math.prod(shape) * kind.itemsize, dtype=torch.uint8, device=group.device)
            dist.broadcast(sent, 0)
            received[name] = sent.cpu().view(kind).reshape(shape)
    return received


def find_weights(text: str, *, runs_dir: Path) -> Path:
    """Return the file, or the directory of a checkpoint, that `text` names.

    Raises:
        ConfigError: if there is none.
        OSError: if the file system does not say.
    """
    candidates = [Path(os.path.expanduser(text)).absolute(), runs_dir / text]  # noqa: PTH111  a Path raises an error for `~nobody`
    for path in candidates:
        if (is_there(path) and path.is_file()) or is_there(path / checkpoint_names.MANIFEST_NAME):
            return path
        if is_there(path / "config.yaml"):
            run = RunDir(path)
            steps = checkpoint_names.committed_steps(run)
            if not steps:
                raise ConfigError(
                    f"`train.init_from` is {text!r}, but the run in {path} has no checkpoint yet. Wait for one, or name another run or file."
                )
            return checkpoint_names.checkpoint_path(run, steps[-1])
    raise ConfigError(
        f"`train.init_from` is {text!r}, but neither the file {str(candidates[0])!r} nor the run {str(candidates[1])!r} exists. Check the name."
    )


def _read(source: Path, group: Group, on_progress: Callable[[], object]) -> dict[str, Tensor]:
    try:
        if source.is_dir():
            return read_with_prefix("model/", source, group, on_progress)
        if source.suffix == ".safetensors":
            return {name: to_torch(one) for name, one in checkpoint_store.read_safetensors(source).items()}
        return _weights_in(torch.load(source, map_location="cpu", weights_only=True), source)
    except CorruptCheckpointError as error:
        raise ConfigError(
            f"`train.init_from` is {str(source)!r}, but that cannot be read: {error} Copy it again, write it again (a file "
            "with `safetensors.torch.save_file`), or name another file or run."
        ) from error
    except OSError as error:
        raise UnreadableError(_unreadable_message(source, error)) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, struct.error) as error:
        # Most of these are of a file that is no pickle: which one depends on its first bytes.
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"`train.init_from` is {str(source)!r}, but PyTorch cannot read weights from it: {first} "
            "Only tensors are read, never code. Write the file with `torch.save(model.state_dict(), PATH)`, or as safetensors."
        ) from error


def _unreadable_message(source: Path | str | None, error: Exception) -> str:
    return (
        f"`train.init_from` is {str(source)!r}, but that cannot be read: {error}. Check that the file system answers and "
        "that you may read it, and submit again."
    )


def _weights_in(content: Any, source: Path) -> dict[str, Tensor]:
    for name in _NESTED_KEYS:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(one, Tensor) for one in content.values()):
        raise ConfigError(
            f"`train.init_from` is {str(source)!r}, but that file holds no weights by name. "
            "Write it with `torch.save(model.state_dict(), PATH)`."
        )
    return {str(name): one for name, one in content.items()}
