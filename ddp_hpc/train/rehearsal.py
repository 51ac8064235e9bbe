"""One forward and backward before the first step, so that the first step adds gradients like all that follow.

DDP packs gradients into buckets. It begins with a guess and packs them anew, in the order in which gradients really
arrived, before the second forward. The packing decides in which order numbers of different ranks are added, so without
a rehearsal a resumed run's first step differs from the same step of the unbroken run, in the last bits, from three
ranks up. After one rehearsed backward the buckets are packed anew before the first real one. No weight changes: the
optimizer does not step, gradients are dropped, buffers and generators are put back. It works on a copy of the batch,
because a forward may change its inputs in place.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from ddp_hpc.train import rng
from ddp_hpc.train.traces import put_back

log = logging.getLogger(__name__)

T = TypeVar("T")


def copied(batch: T) -> T:
    """Return a copy of a batch, for a forward that changes what it is given.

    What shares memory in the batch does so in the copy, and objects of the user's own are copied too.
    """
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # noqa: BLE001  whatever an object of the user's raises
        log.warning(
            "The first batch of an attempt is used twice, and it cannot be copied (%s: %s). "
            "A model that changes its inputs in place gets changed ones in the first step.",
            type(error).__name__,
            error,
        )
        return batch


def rehearse(model: nn.Module, device: torch.device, backward: Callable[[], object]) -> None:
    """Run `backward` (a forward and a backward with gradient synchronisation) and leave no trace of it."""
    with put_back(model, with_parameters=False):
        with rng.preserved(device):
            backward()
        model.zero_grad(set_to_none=True)
