"""Restores the tensors of a model after a pass that is not to count: the same tensor objects, with their old values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn


def kept(
    model: nn.Module, *, with_parameters: bool, is_wanted: Callable[[Tensor], bool] = lambda _: True
) -> Callable[[], None]:
    """Copy those buffers that are wanted (and parameters); return what restores them, and those that are None now."""
    named = [
        (module, name, tensor, None if tensor is None else tensor.detach().clone())
        for module in model.modules()
        for name, tensor in chain(
            module._buffers.items(),  # noqa: SLF001  `named_buffers` leaves out those that are None
            module.named_parameters(recurse=False) if with_parameters else (),
        )
        if tensor is None or is_wanted(tensor)
    ]

    @torch.no_grad()
    def restore() -> None:
        for module, name, tensor, before in named:
            setattr(module, name, tensor)  # the forward may have assigned another tensor
            if tensor is not None and before is not None:
                tensor.copy_(before)

    return restore
