"""The precision of forward and backward: fp32 with or without TF32, bf16, or fp16 with a loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

_DTYPE_BY_NAME = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NULL_CONTEXT = nullcontext()


def precision_text() -> str:
    """Return a text on the precision of float32 in this process; a recipe may have changed it."""
    try:
        matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # torch raises if TF32 was set by its newer `fp32_precision` settings
        return "the recipe sets the precision of float32"
    return (
        f"float32 matrix products at precision {matmul!r} (TF32 {'off' if matmul == 'highest' else 'on'}), "
        f"TF32 {'on' if convolutions else 'off'} in convolutions; `train.matmul_precision` changes both"
    )


@dataclass(frozen=True)
class Precision:
    """Applies `train.precision` on one device."""

    name: Literal["fp32", "bf16", "fp16"]
    device: torch.device

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context manager for forward and loss."""
        if self.name == "fp32":
            return _NULL_CONTEXT
        return torch.autocast(self.device.type, dtype=_DTYPE_BY_NAME[self.name])
