"""Restores the tensors of a model after a trial pass: the same tensor objects, with their old values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def put_back(model: nn.Module, *, with_parameters: bool) -> Iterator[None]:
    """Restore the buffers afterwards, and with `with_parameters` the parameters; keeps a copy of them meanwhile."""
    named = [
        (module, name, tensor, None if tensor is None else tensor.detach().clone())
        for module in model.modules()
        for name, tensor in chain(
            module._buffers.items(),  # noqa: SLF001  `named_buffers` leaves out those that are None
            module.named_parameters(recurse=False) if with_parameters else (),
        )
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, tensor, before in named:
                setattr(module, name, tensor)  # the forward may have assigned another tensor
                if tensor is not None and before is not None:
                    tensor.copy_(before)
