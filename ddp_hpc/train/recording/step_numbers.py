"""Numbers of the steps besides the loss: norm of the gradients, loss scale, skipped updates, tokens. Read at logged steps only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class StepNumbers:
    """What the loop notes while it trains; nothing of it waits for the device before `take`."""

    def __init__(self, tokens: int | Callable[[Any], int] | None, *, computes_norm: bool) -> None:
        self.count_tokens = tokens if callable(tokens) else None
        """A function of a batch, if the recipe has one."""
        self.computes_norm = computes_norm
        """Whether the norm is computed at logged steps where clipping has not done it."""
        self._tokens_a_sample = tokens if isinstance(tokens, int) else None
        self._num_tokens = 0
        self._norm: Tensor | float | None = None
        self._num_skipped: Tensor | int | None = 0

    def note_norm(self, norm: Tensor | float) -> None:
        """Keep the norm of a step's gradients; the newest one is written."""
        self._norm = norm

    def note_tokens(self, batch: Any) -> None:
        """Count the tokens of a micro batch of this rank."""
        if self.count_tokens is not None:
            self._num_tokens += int(self.count_tokens(batch))

    def note_skipped(self, num: Tensor | int) -> None:
        """Add to the updates that were skipped since the line before; a tensor on the device is not read yet."""
        if self._num_skipped is not None:
            self._num_skipped = self._num_skipped + num

    def note_resume_between_lines(self) -> None:
        """Note that an earlier attempt took steps of the next line: how many updates it skipped there is not known."""
        self._num_skipped = None

    def take_num_tokens(self, num_samples: int, add_up: Callable[[Tensor], Tensor]) -> int | None:
        """Return the tokens of all ranks since the last call; None where the recipe does not say. All ranks call it.

        `num_samples` are those of all ranks since then, `add_up` adds a tensor up over the ranks.
        """
        if self._tokens_a_sample is not None:
            return num_samples * self._tokens_a_sample
        if self.count_tokens is None:
            return None
        own, self._num_tokens = self._num_tokens, 0
        return int(add_up(torch.tensor(own, dtype=torch.int64)).item())

    def take(self, scaler: torch.amp.GradScaler | None, *, may_skip: bool) -> dict[str, float | None]:
        """Return the numbers for a line; this reads them from the device. `may_skip`: the loop itself skips updates."""
        found: dict[str, float | None] = {}
        if self._norm is not None:
            found["grad_norm"] = float(self._norm)
        if scaler is not None:
            found["loss_scale"] = scaler.get_scale()
        if scaler is not None or may_skip:
            found["skipped_updates"] = None if self._num_skipped is None else int(self._num_skipped)
        self._norm, self._num_skipped = None, 0
        return found


def gradient_norm(parameters: Sequence[Tensor], scaler: torch.amp.GradScaler | None, *, kind: float = 2.0) -> Tensor:
    """Return, on the device, the total norm of the gradients, which stay as they are; with a scaler, what it will be without the scale."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    numbers = [one.coalesce().values() if one.is_sparse else one for one in gradients if one.numel()]
    norm = torch.nn.utils.get_total_norm(numbers, kind) if numbers else torch.zeros((), device=parameters[0].device)
    return norm if scaler is None else norm / scaler.get_scale()
