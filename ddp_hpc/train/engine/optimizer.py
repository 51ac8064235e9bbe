"""The optimizers of the configuration, and their learning rate; weight decay applies to weights, not to biases."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.spec import LrScheduleSpec, OptimizerSpec

log = logging.getLogger(__name__)


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return two parameter groups: matrices and filters with weight decay; biases, norms and other vectors without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all groups of the optimizer."""
    return [parameter for options in optimizer.param_groups for parameter in options["params"]]


NO_OPTIMIZER_MESSAGE = (
    "`Recipe.optimizer` is called with the model and `train.lr`, and has to return an optimizer, but {}. Write "
    "`lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr)`; schedules are keys (`lr_schedule.name`), or are stepped in the optimizer's own `step`."
)


def refuse_misfit(optimizer: Any) -> None:
    """Raise ConfigError where this is another object than an optimizer, or one whose step needs to compute the loss again."""
    if not callable(getattr(optimizer, "step", None)) or not hasattr(optimizer, "param_groups"):
        raise ConfigError(NO_OPTIMIZER_MESSAGE.format(f"returned {type(optimizer).__name__}"))
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise closure_error(optimizer)


def closure_error(optimizer: torch.optim.Optimizer) -> ConfigError:
    """Return the error for an optimizer that asks for a closure."""
    return ConfigError(
        f"The optimizer {type(optimizer).__name__} asks for a `closure`, to compute the loss several times in a step (as LBFGS and SAM do), but "
        "ddp-hpc computes it once in each step, over all ranks. Use an optimizer whose `step()` needs no closure, or train with a script of your own "
        "(docs/scripts.md)."
    )


def set_rates(
    optimizer: torch.optim.Optimizer, base_lrs: Sequence[float | None], factor: float, last_factor: float | None = None
) -> None:
    """Set the learning rate of each group; one without a rate (`lr=None`) keeps its own. Warn once of one that is not as `last_factor` set it."""
    if len(optimizer.param_groups) != len(base_lrs):
        raise ConfigError(
            f"The optimizer had {len(base_lrs)} parameter groups before the first step, but has {len(optimizer.param_groups)} now (`add_param_group`). No "
            "checkpoint of it could be resumed, because a resumed run begins with the groups of the recipe. Give the optimizer all groups when the "
            "recipe makes it, and freeze weights by `weight.grad = None` in its step."
        )
    for options, base_lr in zip(optimizer.param_groups, base_lrs, strict=True):
        if base_lr is not None:
            if last_factor is not None and isinstance(options["lr"], float) and options["lr"] != base_lr * last_factor:
                _warn_of_own_rates()
            options["lr"] = base_lr * factor


@functools.cache
def _warn_of_own_rates() -> None:
    log.warning(
        "The code of the recipe sets a learning rate (`lr` of a group), as a scheduler of PyTorch does, but ddp-hpc sets each before every step, so "
        "that has no effect. Use `train.lr_schedule`, and give each group its rate when the recipe makes the optimizer; remove the scheduler."
    )


def lr_factor(schedule: LrScheduleSpec, step: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate for step `step`, counted from zero: of the step alone, so no checkpoint has to hold it."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "cosine":
        span = max(total_steps - schedule.warmup_steps, 1)
        done = min((step - schedule.warmup_steps) / span, 1.0)
        return schedule.min_factor + (1 - schedule.min_factor) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.name == "step":
        return schedule.gamma ** sum(step >= milestone for milestone in schedule.milestones)
    return 1.0


def why_not_fused(model: nn.Module) -> str:
    """Return why PyTorch's fused kernels cannot update these weights on a GPU; empty where they can."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and not weight.is_floating_point():
            return f"the weight {name!r} is of type {weight.dtype}"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"the gradients of the embedding {name!r} are sparse"
    return ""


def build_optimizer(spec: OptimizerSpec, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer that the configuration names; with fused kernels on GPUs."""
    groups = decay_groups(model, spec.weight_decay)
    is_on_gpu = all(parameter.is_cuda for parameter in model.parameters())
    why_not = why_not_fused(model)
    if is_on_gpu and why_not:
        log.info("the optimizer runs without fused kernels, because %s", why_not)
    fused = is_on_gpu and not why_not
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=spec.betas, eps=spec.eps, fused=fused)
    nesterov = spec.nesterov and spec.momentum > 0
    return torch.optim.SGD(groups, lr=lr, momentum=spec.momentum, nesterov=nesterov, fused=fused)


def can_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a step does nothing but run kernels that take `found_inf`, a tensor that says whether to leave out the update."""
    hooks = {*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()}  # noqa: SLF001
    return type(optimizer) in _SKIPPING_CLASSES and not hooks - {_begin_momentum} and _is_fused(optimizer)


_SKIPPING_CLASSES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Their own `step`; one of a subclass may do more, also where the kernels leave the update out."""


def _is_fused(optimizer: torch.optim.Optimizer) -> bool:
    supports = getattr(optimizer, "_step_supports_amp_scaling", False)  # as `GradScaler` asks
    return bool(supports) and all(options.get("fused") for options in optimizer.param_groups)


def add_momentum_hook(optimizer: torch.optim.Optimizer, *, may_skip: bool) -> None:
    """Have a fused SGD with momentum be right where its first updates may be skipped, or a weight has its first gradient late.

    PyTorch makes its momentum in the first step and leaves the memory as it is if that step is skipped; the next one adds to it. A
    weight whose first gradient comes in a later step than those of others is an error there.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not _is_fused(optimizer):
        return
    if any(options["momentum"] and options["dampening"] for options in optimizer.param_groups):
        if not may_skip:
            return
        log.info(
            "the fused kernels of SGD with `dampening` are wrong after a first step that is skipped, so they are not used; "
            "the loop waits for the device in each step. Without `dampening` it does not."
        )
        optimizer._step_supports_amp_scaling = False  # noqa: SLF001
        for options in optimizer.param_groups:
            options["fused"] = False
        return
    optimizer.register_step_pre_hook(_begin_momentum)


def _begin_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Make the momentum that is not there yet, of -0.0: to add a gradient to it gives that gradient to the bit, also -0.0."""
    for options in optimizer.param_groups:
        for one in options["params"] if options["momentum"] else ():
            if one.grad is not None and optimizer.state[one].get("momentum_buffer") is None:
                optimizer.state[one]["momentum_buffer"] = torch.full_like(one.grad, -0.0)
