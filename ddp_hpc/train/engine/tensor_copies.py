"""Restores the tensors of a model after a pass whose update is skipped: the same tensor objects, with their old values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

Place = tuple[nn.Module, str]
"""A module, and the name of a buffer or parameter of it."""


class CopiedTensor(NamedTuple):
    """A buffer or parameter of a module, and a copy of its value; both are None for a buffer without a value."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    before: Tensor | None
    version: int

    def current_value(self) -> Tensor | None:
        """Return what the module has there now."""
        return getattr(self.module, self.name)  # type: ignore[no-any-return]  # a tensor or None

    def is_changed(self) -> bool:
        """Tell whether a pass may have changed it; this reads it from the device."""
        now = self.current_value()
        if now is None or self.before is None:
            return now is not self.tensor
        if now is not self.tensor or now._version != self.version:  # noqa: SLF001
            return True
        return not torch.equal(now, self.before.to(now.device))  # through `data`, no version counts

    def can_restore_where(self, device: torch.device) -> bool:
        """Tell whether each element can come from before or from now, as a tensor on this device says."""
        now, before = self.current_value(), self.before
        if now is None or before is None:
            return now is before
        kinds = [(one.shape, one.dtype, one.device, one.layout) for one in (now, before)]
        # One that is expanded has one number in many places.
        return kinds[0] == kinds[1] and kinds[0][2:] == (device, torch.strided) and now.is_contiguous()


def places(model: nn.Module) -> Iterator[Place]:
    """Yield where the model has its buffers, also those that are None, and its parameters."""
    for module in model.modules():
        yield from ((module, name) for name in module._buffers)  # noqa: SLF001  `named_buffers` leaves out those that are None
        yield from ((module, name) for name, _ in module.named_parameters(recurse=False))


def copy_places(found: Iterable[Place], *, copies_on: torch.device | None = None) -> list[CopiedTensor]:
    """Copy what is at these places, to another device if one is named."""
    copies = []
    for module, name in found:
        tensor = getattr(module, name)
        before = None if tensor is None else tensor.detach()
        if before is not None:
            before = before.clone() if copies_on is None else before.to(copies_on, copy=True)
        copies.append(CopiedTensor(module, name, tensor, before, 0 if tensor is None else tensor._version))  # noqa: SLF001
    return copies


@torch.no_grad()
def restore(found: list[CopiedTensor]) -> None:
    """Put back what was copied."""
    for module, name, tensor, before, _ in found:
        held = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers  # noqa: SLF001  its own `__setattr__` may refuse
        held[name] = tensor  # type: ignore[assignment]  # the forward may have assigned another tensor
        if tensor is not None and before is not None:
            tensor.copy_(before)


@torch.no_grad()
def restore_where(found: list[CopiedTensor], is_wrong: Tensor) -> None:
    """Put back what was copied if a tensor on the device is true; the host does not wait to know."""
    for one in found:
        now = one.current_value()
        if now is not None and one.before is not None:
            now.copy_(torch.where(is_wrong, one.before, now))
