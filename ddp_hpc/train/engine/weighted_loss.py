"""Losses that are not a plain mean over samples: the right mean of those that say their weight, and a warning of the others."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from copy import copy
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.data.loader import map_leaves
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Loss, WeightedLoss

log = logging.getLogger(__name__)

_CLASS_WEIGHT_LOSSES = {nn.CrossEntropyLoss, nn.NLLLoss}
_MOST_PARTS = 16
_TOLERANCE = 1e-3
_EFFECT_TEXT = "So loss, gradients and evaluation depend on `train.micro_batch_size`, `eval.batch_size` and the number of workers. "
_NO_MEAN_MESSAGE = (
    "`Recipe.loss` is not a mean over samples: it gives %s for %d samples together, and %s on average for these in %d parts. "
    f"{_EFFECT_TEXT}With class weights, `ignore_index` or a mask, return a `WeightedLoss` from it, the sum over the samples and what to divide it by: "
    'see "A loss with weights" in docs/recipes.md. If it compares samples with each other, keep these settings as they are.'
)
_NO_SUM_MESSAGE = (
    "`Recipe.loss` returns a `WeightedLoss` that is not a sum with its weight: it gives %s for %d samples in one call, but %s in all if they come in %d calls. "
    f'{_EFFECT_TEXT}Return the sum over the samples (`reduction="sum"`), and what to divide it by.'
)


def compute_loss(loss: Loss, outputs: Any, targets: Any) -> tuple[Tensor, Tensor | None]:
    """Call `Recipe.loss`; return a mean and None, or a sum and its weight, in float64.

    PyTorch's losses with class weights return a sum over the weights in it, so their sum and weight are taken apart here.
    """
    is_of_classes = type(loss) in _CLASS_WEIGHT_LOSSES and isinstance(targets, Tensor)
    if is_of_classes and (classes := cast("nn.NLLLoss", loss)).reduction == "mean" and classes.weight is not None:
        summed = copy(classes)
        summed.reduction = "sum"
        total = summed(outputs, targets)  # first: its words on a wrong label say most
        if targets.is_floating_point():  # by probabilities: PyTorch divides by their rows, whatever the weights
            return total, total.new_tensor(targets.numel() / targets.shape[min(1, targets.dim() - 1)]).double()
        labels = targets.long()
        counts = labels != classes.ignore_index
        weight = classes.weight[labels.masked_fill(~counts, 0)] * counts
        return total, weight.double().sum()
    value: Any = loss(outputs, targets)
    if isinstance(value, Tensor):
        return value, None
    if not isinstance(value, WeightedLoss):
        raise ConfigError(
            f"`Recipe.loss` returned a {type(value).__name__}. Return the mean over the samples, a scalar tensor; or, with class weights or a "
            "mask, `WeightedLoss(total, weight)` of ddp_hpc.train.recipe."
        )
    total, weight = value.total, torch.as_tensor(value.weight, device=value.total.device).detach()
    if total.numel() != 1 or weight.numel() != 1:
        raise ConfigError(
            f"`Recipe.loss` returned a `WeightedLoss` of shapes {tuple(total.shape)} and {tuple(weight.shape)}. Return two scalars: the sum over "
            "the samples, and what to divide it by."
        )
    return total.reshape(()), weight.double().reshape(())


def divide_by_weight(own: Tensor, num_samples: int, parameters: Iterable[Tensor], group: Group) -> Tensor:
    """Turn gradients of the sum over `num_samples` into those of the weighted mean; return this rank's part of that mean.

    `own` are this rank's sum and weight; a small all-reduce adds up the weights. Where that is 0, so is the mean.
    """
    weight = group.sum(own[1].clone())
    inverse = torch.where(weight == 0, 0.0, 1 / weight)
    gradients = [one.grad for one in parameters if one.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, (num_samples * inverse).to(gradients[0].real.dtype))
    return own[0] * inverse


def num_parts_of(num_samples: int) -> int:
    """Return into how many parts a batch is divided to check its loss; 0 for a batch that has none."""
    return 0 if num_samples < 2 else min(_MOST_PARTS, num_samples)


@torch.no_grad()
def warn_of_no_mean(loss: Loss, outputs: Any, targets: Any, num_parts: int) -> None:
    """Warn if a batch's loss is not what its parts give together; say nothing where outputs and targets do not have a row a sample.

    It calls the loss, which may change things: call it where these are put back. With the same `num_parts` on all ranks, it calls a
    loss that has collectives equally often on all.
    """
    with suppress(Exception):  # what the loss raises for the whole batch, the training raises again
        sizes: set[int] = set()
        map_leaves((outputs, targets), lambda leaf: sizes.update(leaf.shape[:1]))
        (num,) = sizes
        ends = [number * num // num_parts for number in range(num_parts + 1)]
        whole, again = (_loss_share(loss, outputs, targets, slice(0, num), num) for _ in range(2))
        parts = torch.stack([_loss_share(loss, outputs, targets, slice(*one), num) for one in pairwise(ends)])
        is_sum = (parts.sum(0) - whole).abs() <= _TOLERANCE * parts.abs().sum(0)
        if torch.equal(whole, again) and not is_sum.all():  # a loss that draws random numbers differs in each call
            text = _NO_MEAN_MESSAGE if len(whole) == 1 else _NO_SUM_MESSAGE
            log.warning(text, _numbers_text(whole), num, _numbers_text(parts.sum(0)), num_parts)


def _loss_share(loss: Loss, outputs: Any, targets: Any, rows: slice, num: int) -> Tensor:
    """Return what the loss of some of `num` samples adds to that of all: a part of the mean, or a sum and its weight."""

    def taken(leaf: Tensor) -> Tensor:
        part = leaf[rows] if leaf.dim() else leaf
        return part.to(torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else part.dtype, copy=True)

    value, weight = compute_loss(loss, *map_leaves((outputs, targets), taken))
    if weight is None:
        return torch.stack([value.double() * (rows.stop - rows.start) / num])
    return torch.stack([value.double(), weight])


def _numbers_text(found: Tensor) -> str:
    return " and ".join(f"{one:.4g}" for one in found.tolist())
