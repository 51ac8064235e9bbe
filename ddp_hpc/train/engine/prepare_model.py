"""Prepares the recipe's model for training: refuses what has no shape or is not trained, moves it to the device, builds its optimizer, wraps it in DDP."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.data.sample_order import SampleOrder
from ddp_hpc.train.engine import modes
from ddp_hpc.train.engine.batch_norm_check import warn_of_single_samples
from ddp_hpc.train.engine.compiled import compile_model
from ddp_hpc.train.engine.optimizer import NO_OPTIMIZER_MESSAGE, add_momentum_hook, build_optimizer, refuse_misfit
from ddp_hpc.train.engine.precision import Precision
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state.moving_average import MovingAverage
from ddp_hpc.train.state.training_state import TrainingState, named_tensors


def initial_state(
    spec: RunSpec, recipe: Recipe, group: Group, order: SampleOrder, precision: Precision
) -> TrainingState:
    """Move the model and the loss to the device, and build the optimizer for them."""
    _refuse_lazy(recipe)
    # In this order: DDP must find the converted batch norms
    # (https://pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html), and the optimizer the parameters on the
    # device (https://pytorch.org/docs/stable/optim.html#constructing-it).
    bare = recipe.model
    if spec.train.sync_batch_norm and group.rank_info.world_size > 1:
        bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare)
    bare = bare.to(group.device)
    synced = [one for one in bare.modules() if isinstance(one, nn.SyncBatchNorm)]
    if group.device.type == "cpu" and any(one.training or group.rank_info.world_size > 1 for one in synced):
        raise ConfigError(
            "`Recipe.model` has a `SyncBatchNorm`, which PyTorch computes on GPUs only, but this run has none. Leave batch norms unconverted in the "
            "recipe, and set `train.sync_batch_norm=true` for runs on GPUs; or ask for GPUs (`resources.gpus_per_node`)."
        )
    if spec.train.channels_last:
        bare = bare.to(memory_format=torch.channels_last)
    _move_loss(recipe, bare, group.device)
    modes.set_train_mode_once(bare)
    warn_of_single_samples(order, bare)
    bare.zero_grad()  # the recipe may have called backward while it built the model
    make_optimizer = recipe.optimizer or partial(build_optimizer, spec.optimizer)
    if isinstance(make_optimizer, type) and make_optimizer.__module__.startswith("torch.optim."):
        raise ConfigError(NO_OPTIMIZER_MESSAGE.format(f"is the class {make_optimizer.__name__} itself"))
    optimizer = make_optimizer(bare, spec.train.lr)
    refuse_misfit(optimizer)
    scaler = torch.amp.GradScaler(group.device.type) if precision.name == "fp16" else None
    add_momentum_hook(optimizer, may_skip=scaler is not None or spec.train.on_nonfinite == "skip")
    return TrainingState(
        model=bare,
        optimizer=optimizer,
        has_recipes_optimizer=recipe.optimizer is not None,
        device=group.device,
        rank=group.rank_info.rank,
        world_size=group.rank_info.world_size,
        loss_meter=torch.zeros((), device=group.device),
        scaler=scaler,
        ema=None if spec.train.ema_decay is None else MovingAverage(bare, spec.train.ema_decay),
    )


def _refuse_lazy(recipe: Recipe) -> None:
    """Raise ConfigError for lazy layers: neither the optimizer nor DDP accepts parameters without a shape."""
    for part, module in (("model", recipe.model), ("loss", recipe.loss)):
        if not isinstance(module, nn.Module):
            continue
        lazy = [name for name, value in named_tensors(module).items() if is_lazy(value)]
        if lazy:
            raise ConfigError(
                f"`Recipe.{part}` has {lazy[0]!r}, whose shape is not known before the first input (a layer like "
                "`torch.nn.LazyLinear`), so it could be neither trained nor saved.\n"
                "Give it one batch in the function that builds the recipe: `with torch.no_grad(): model(inputs)`."
            )


def _move_loss(recipe: Recipe, model: nn.Module, device: torch.device) -> None:
    """Move a loss that is a module to the device: it may have class weights, or be a network itself."""
    loss = recipe.loss
    if not isinstance(loss, nn.Module):
        return
    loss.to(device)
    known = set(model.parameters())
    outside = [name for name, value in loss.named_parameters() if value.requires_grad and value not in known]
    if outside:
        raise ConfigError(
            f"`Recipe.loss` has the parameter {outside[0]!r}, which is not in `Recipe.model`, so it would be neither "
            "trained nor saved. Make the loss part of the model (`model.criterion = criterion`), or call "
            "`requires_grad_(False)` where it is not to be trained."
        )


def wrap_model(spec: RunSpec, bare: nn.Module, group: Group) -> nn.Module:
    """Return the model for the loop: in DDP if there are several ranks, compiled if asked."""
    model = bare
    if group.rank_info.world_size > 1:
        try:
            model = DistributedDataParallel(
                bare,
                device_ids=[group.device.index] if group.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                find_unused_parameters=spec.train.find_unused_parameters,
            )
        except (RuntimeError, TypeError) as error:
            raise _explain_unsendable(bare, error) or error from error
    return compile_model(model) if spec.train.compile else model


def _explain_unsendable(model: nn.Module, error: Exception) -> ConfigError | None:
    """Return the error for a weight or buffer of a type that the ranks cannot send to each other, if that was it."""
    unknown = (torch.uint16, torch.uint32, torch.uint64)
    named = [(name, one.dtype) for name, one in named_tensors(model).items()]
    rare = [(name, dtype) for name, dtype in named if "float8" in str(dtype) or dtype in unknown]
    if not rare or "type" not in str(error):
        return None
    name, dtype = rare[0]
    return ConfigError(
        f"The model has {name!r} of {dtype}, which ranks cannot send to each other ({error}), as DDP does at the start. Run on one worker; or keep its "
        "bytes in a buffer of torch.uint8 (`value.view(torch.uint8)`), and view them as what they are in `forward`."
    )
