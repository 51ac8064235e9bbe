"""One forward and backward pass before the first step, so that a resumed run repeats its steps bit by bit.

The warm-up changes no weight: the optimizer does not step, gradients are dropped, buffers and random generators are restored.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from ddp_hpc.train.engine.traces import put_back
from ddp_hpc.train.state import rng

log = logging.getLogger(__name__)

T = TypeVar("T")


def copied(batch: T) -> T:
    """Return a deep copy of a batch, because the forward pass may change its inputs in place."""
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # noqa: BLE001  a user's object may raise anything
        log.warning(
            "The first batch of an attempt is used twice, to warm up DDP and to train, but it cannot be copied (%s: %s). If "
            "the model changes its inputs in place, the first step trains on the changed inputs. Change no inputs in place, or make the batch of types that `copy.deepcopy` copies.",
            type(error).__name__,
            error,
        )
        return batch


def warm_up_ddp(model: nn.Module, device: torch.device, backward: Callable[[], object]) -> None:
    """Run `backward` (forward and backward with gradient synchronisation), then restore everything that it changed."""
    # DDP all-reduces gradients in buckets. For the first backward pass it fills the buckets in the reverse order of
    # `model.parameters()`; before the second forward pass it rebuilds them, once, in the order in which gradients really
    # became ready: https://pytorch.org/docs/stable/notes/ddp.html#internal-design
    # The buckets decide in which order the numbers of the ranks are added, and a sum of floats depends on that order. So
    # without a warm-up, the first step after a resume would differ from the same step of an unbroken run in the last bits,
    # with three or more ranks.
    with put_back(model, with_parameters=False):
        with rng.preserved(device):
            backward()
        model.zero_grad(set_to_none=True)
