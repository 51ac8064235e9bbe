"""The moving average of a model's weights, which an update takes in without a wait for the device."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError


class MovingAverage:
    """An exponential moving average of the parameters, beside the buffers of the model as they are now."""

    # PyTorch's `AveragedModel` computes the same, to the bit. It keeps its count in a tensor, which it copies to the device
    # in each step, and the host waits for that copy.

    def __init__(self, model: nn.Module, decay: float) -> None:
        try:
            self.module = copy.deepcopy(model)
        except Exception as error:
            raise ConfigError(
                f"`train.ema_decay` is {decay}, which needs a copy of `Recipe.model`, but `copy.deepcopy` cannot copy it ({type(error).__name__}: {error}). "
                "Keep in the model only what can be copied: no locks, open files or results of a computation as attributes. Or leave `train.ema_decay` out."
            ) from error
        self.num_updates = 0
        self.warms_up = True
        """False in a run that an older version has begun, whose decay is the same from the first step on."""
        self._decay = decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights of `model`; the first time, copy them."""
        # An average over as many steps as there were does not lag behind a short training.
        decay = min(self._decay, (1 + self.num_updates) / (10 + self.num_updates)) if self.warms_up else self._decay
        for averages, newest in _group_by_dtype(self.module.parameters(), model.parameters()):
            if self.num_updates == 0:
                torch._foreach_copy_(averages, newest)
            elif averages[0].is_floating_point() or averages[0].is_complex():
                torch._foreach_lerp_(averages, newest, 1 - decay)
            else:
                for average, new in zip(averages, newest, strict=True):
                    average.copy_(average * decay + new * (1 - decay))
        for own, theirs in _group_by_dtype(self.module.buffers(), model.buffers()):
            torch._foreach_copy_(own, theirs)
        self.num_updates += 1


def _group_by_dtype(own: Iterable[Tensor], theirs: Iterable[Tensor]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Return pairs of lists of tensors that one kernel can take: of one device and type."""
    found = defaultdict[object, tuple[list[Tensor], list[Tensor]]](lambda: ([], []))
    for one, other in zip(own, theirs, strict=True):
        both = found[one.device, one.dtype, other.device, other.dtype]
        both[0].append(one.detach())
        both[1].append(other.detach())
    return found.values()
