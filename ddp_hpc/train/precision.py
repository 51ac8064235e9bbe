"""The arithmetic of forward and backward: fp32, bf16, or fp16 with a scaled loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_AS_IT_IS = nullcontext()


@dataclass(frozen=True)
class Precision:
    """How `train.precision` is carried out on one device."""

    name: Literal["fp32", "bf16", "fp16"]
    device: torch.device

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context that forward and loss run in."""
        if self.name == "fp32":
            return _AS_IT_IS
        return torch.autocast(self.device.type, dtype=_AUTOCAST[self.name])

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """Return fp16's loss scaler; the others need none."""
        return torch.amp.GradScaler(self.device.type) if self.name == "fp16" else None
