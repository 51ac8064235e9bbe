"""Restores the tensors of a model after a pass that is not to count: the same tensor objects, with their old values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module, and the name of a buffer or parameter of it."""


class Kept(NamedTuple):
    """A buffer or parameter of a module, and a copy of its value; both are None for a buffer that is None."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    before: Tensor | None
    version: int

    def now(self) -> Tensor | None:
        """Return what the module has there now."""
        return getattr(self.module, self.name)  # type: ignore[no-any-return]  # a tensor or None

    def is_changed(self) -> bool:
        """Tell whether a pass may have changed it; this reads it from the device."""
        now = self.now()
        if now is None or self.before is None:
            return now is not self.tensor
        return now is not self.tensor or now._version != self.version or not torch.equal(now, self.before)  # noqa: SLF001

    def can_be_chosen(self) -> bool:
        """Tell whether each element can come from before or from now, as a tensor on the device says."""
        now, before = self.now(), self.before
        if now is None or before is None:
            return now is before
        return (now.shape, now.dtype, now.layout, torch.strided) == (
            before.shape,
            before.dtype,
            torch.strided,
            before.layout,
        )


def places(model: nn.Module, *, with_parameters: bool) -> Iterator[Place]:
    """Yield where the model has its buffers, also those that are None, and its parameters."""
    for module in model.modules():
        yield from ((module, name) for name in module._buffers)  # noqa: SLF001  `named_buffers` leaves out those that are None
        if with_parameters:
            yield from ((module, name) for name, _ in module.named_parameters(recurse=False))


def kept(found: Iterable[Place]) -> list[Kept]:
    """Copy what is at these places."""
    return [_kept(module, name, getattr(module, name)) for module, name in found]


def _kept(module: nn.Module, name: str, tensor: Tensor | None) -> Kept:
    if tensor is None:
        return Kept(module, name, None, None, 0)
    return Kept(module, name, tensor, tensor.detach().clone(), tensor._version)  # noqa: SLF001


@torch.no_grad()
def restore(found: list[Kept]) -> None:
    """Put back what was copied."""
    for module, name, tensor, before, _ in found:
        setattr(module, name, tensor)  # the forward may have assigned another tensor
        if tensor is not None and before is not None:
            tensor.copy_(before)


@torch.no_grad()
def restore_where(found: list[Kept], is_wrong: Tensor) -> None:
    """Put back what was copied if a tensor on the device is true; the host does not wait to know."""
    for one in found:
        now = one.now()
        if now is not None and one.before is not None:
            now.copy_(torch.where(is_wrong, one.before, now))
