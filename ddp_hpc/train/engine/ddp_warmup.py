"""One forward and backward pass before the first step, so that a resumed run repeats its steps bit by bit.

The warm-up leaves nothing behind: no optimizer steps, and all that the pass has changed in the model is put back.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import nn

from ddp_hpc.train.engine.set_aside import tried_out

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


def warm_up_ddp(
    model: nn.Module, called: Iterable[object], device: torch.device, backward: Callable[[], object]
) -> None:
    """Run `backward` (forward and backward with gradient synchronisation), then restore what it changed of the model and of what it `called`."""
    # DDP all-reduces gradients in buckets. For the first backward pass it fills the buckets in the reverse order of
    # `model.parameters()`; before the second forward pass it rebuilds them, once, in the order in which gradients really
    # became ready: https://pytorch.org/docs/stable/notes/ddp.html#internal-design
    # The buckets decide in which order the numbers of the ranks are added, and a sum of floats depends on that order. So
    # without a warm-up, the first step after a resume would differ from the same step of an unbroken run in the last bits,
    # with three or more ranks.
    with tried_out(model, called, device):
        backward()
