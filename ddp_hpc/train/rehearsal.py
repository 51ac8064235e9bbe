"""One forward and backward before the first step, so that the first step adds gradients like all that follow.

DDP packs gradients into buckets. It begins with a guess and packs them anew, in the order in which gradients really
arrived, before the second forward. The packing decides in which order numbers of different ranks are added, so without
a rehearsal a resumed run's first step differs from the same step of the unbroken run, in the last bits, from three
ranks up. After one rehearsed backward the buckets are packed anew before the first real one. No weight changes: the
optimizer does not step, gradients are dropped, buffers and generators are put back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ddp_hpc.train import rng


def rehearse(model: nn.Module, device: torch.device, backward: Callable[[], object]) -> None:
    """Run `backward` (a forward and a backward with gradient synchronisation) and leave no trace of it."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with rng.preserved(device):
        backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
