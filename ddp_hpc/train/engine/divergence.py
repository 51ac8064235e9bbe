"""Handles losses, gradients and weights that are not finite (`train.on_nonfinite`)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ddp_hpc.checkpoints import checkpoint_names
from ddp_hpc.errors import DivergedError
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.spec import OnNonfinite
from ddp_hpc.train.engine.lone_losses import LoneLosses
from ddp_hpc.train.engine.traces import kept
from ddp_hpc.train.process_group import Group

log = logging.getLogger(__name__)

MOST_IN_A_ROW: Mapping[OnNonfinite, int] = {"stop": 5, "skip": 50}
"""Steps in a row whose loss (or skipped update) is not finite, by policy, after which the run ends as diverged."""


class Checkpoints(Protocol):
    """What `Checkpointer` offers to those who end a run that has diverged; it imports this module."""

    newest_losses: Callable[[], Sequence[Tensor]]
    """Losses of the newest step; a save of a state that has led to one that is not finite is refused."""
    refused: str | None
    """On rank zero, why a save was refused."""

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is committed."""


class LossWatch:
    """Ends a training whose losses are no longer finite.

    The loop only keeps each loss. To read one means to wait for the device, so the ranks read them all when they
    synchronise anyway (`StopConsensus`).
    """

    def __init__(
        self,
        run: RunDir,
        group: Group,
        checkpointer: Checkpoints,
        *,
        policy: OnNonfinite,
        lone: LoneLosses,
    ) -> None:
        self._run = run
        self._group = group
        self._checkpointer = checkpointer
        self._policy = policy
        self._limit = MOST_IN_A_ROW.get(policy)
        self._steps: list[int] = []
        self._losses: list[Tensor] = []
        self._num_in_a_row = 0
        self._lone = lone
        if self._limit is not None:
            checkpointer.newest_losses = self._newest

    def _newest(self) -> Sequence[Tensor]:
        return self._losses[bisect_left(self._steps, self._steps[-1]) :] if self._steps else []

    def note(self, step: int, loss: Tensor) -> None:
        """Keep the loss of one micro batch of `step` for the next `check`."""
        if self._limit is not None:
            self._steps.append(step)
            self._losses.append(loss)

    def check(self, *, is_last: bool = False) -> None:
        """End the run on all ranks if the losses of any rank, or weights that rank zero should save, are not finite.

        After the last step, one such loss is enough. All ranks call this after the same step.

        Raises:
            DivergedError: with the same text on all ranks.
        """
        if self._limit is None or not self._steps:
            return
        first, last = self._steps[0], self._steps[-1]
        is_bad = torch.stack(self._losses).isfinite().logical_not().cpu().long()
        # How many losses of each step are bad, and last, whether rank zero refused to save. All ranks look after the same step
        # (`StopConsensus`), so the tensor has the same length on all of them, as an all-reduce requires.
        votes = torch.zeros(last - first + 2, dtype=torch.int64)
        votes.index_add_(0, torch.tensor(self._steps) - first, is_bad)
        votes[-1] = int(self._checkpointer.refused is not None)
        own = votes.tolist()
        *num_bad, is_refused = self._group.sum(votes).tolist()
        self._steps, self._losses = [], []
        for step, count in enumerate(num_bad, first):
            self._lone.note(step, is_mine=bool(own[step - first]), is_finite=not count)
            self._num_in_a_row = self._num_in_a_row + 1 if count else 0
            if self._num_in_a_row == self._limit:
                self._end(f"the loss is not finite since step {step - self._limit + 1}")
        if is_last and self._num_in_a_row and self._policy == "stop":
            self._end(f"the loss is not finite since step {last - self._num_in_a_row + 1}")
        if is_refused:
            self._end(str(self._checkpointer.refused))

    def _end(self, what: str) -> None:
        self._checkpointer.wait()  # commit the checkpoint that is being written: its weights are finite
        what += self._lone.end()
        text = diverged(self._run, what) if self._group.rank_info.is_rank_zero else None
        raise DivergedError(self._group.last_word("diverged", text))


def diverged(run: RunDir, what: str) -> str:
    """Return the message that a run has diverged, with what its user can do."""
    steps = checkpoint_names.committed_steps(run)
    goes_on = f"goes on from step {steps[-1]}, its newest checkpoint; with `--fresh` it starts over" if steps else ""
    return (
        f"The training has diverged: {what}. Lower `train.lr`, or limit the gradients with `train.grad_clip_norm`, and "
        f"submit the run again: it {goes_on or 'starts over, as it has no checkpoint yet'}."
    )


def of_nan_check(error: BaseException, run: RunDir, *, rank: int, step: int) -> DivergedError | None:
    """Return what an error of PyTorch's check for NaN means (`debug.nan`); None for any other error.

    PyTorch has no type for it: c10d raises a plain RuntimeError, on the rank alone whose own tensor has the NaN.
    """
    if not isinstance(error, RuntimeError) or "NaN found in input tensor" not in str(error):
        return None
    what = f"what rank {rank} had computed itself has a NaN, in step {step + 1}, before the ranks exchanged it"
    return DivergedError(diverged(run, what))


class UpdateGuard:
    """With the policy `skip`, skips updates whose gradients are not finite.

    It waits for the device once a step. With fp16 the loss scaler skips such updates itself.
    """

    def __init__(
        self,
        run: RunDir,
        model: nn.Module,
        checkpointer: Checkpoints,
        *,
        is_active: bool,
        before_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Call `before_end` on all ranks before the run ends: it may raise a better reason."""
        self._run = run
        self._before_end = before_end
        self._checkpointer = checkpointer
        self._model = model
        self._restore_buffers: Callable[[], object] = lambda: None
        self.is_active = is_active
        self._num_skipped = 0
        self._num_in_a_row = 0

    def keep_buffers(self) -> None:
        """Copy what the forward may change (batch-norm statistics), to restore it if the update is skipped."""
        self._restore_buffers = kept(self._model, with_parameters=False, is_wanted=_may_be_nonfinite)

    def skips(self, optimizer: torch.optim.Optimizer, step: int) -> bool:
        """Tell whether to skip this update.

        Raises:
            DivergedError: if too many updates in a row are skipped.
        """
        # DDP has all-reduced the gradients, so they and the answer are the same on all ranks. If one rank skipped
        # alone, its weights would differ from then on.
        if not self.is_active or _are_finite(optimizer):
            self._num_in_a_row = 0
            return False
        self._num_skipped += 1
        self._num_in_a_row += 1
        if self._num_skipped.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th, ...
            log.warning(
                "the gradients of step %d are not finite, so its update is skipped (`train.on_nonfinite`): "
                "%d skipped since this attempt began. The training goes on, until %d in a row are skipped.",
                step,
                self._num_skipped,
                MOST_IN_A_ROW["skip"],
            )
        self._restore_buffers()
        if self._num_in_a_row >= MOST_IN_A_ROW["skip"]:
            self._checkpointer.wait()  # commit the checkpoint that is being written: its weights are finite
            self._before_end()
            raise DivergedError(
                diverged(self._run, f"the gradients are not finite since step {step - self._num_in_a_row + 1}")
            )
        return True


def _may_be_nonfinite(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _are_finite(optimizer: torch.optim.Optimizer) -> bool:
    gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    numbers = [one.coalesce().values() if one.is_sparse else one for one in gradients if one.numel()]
    return bool(torch.nn.utils.get_total_norm(numbers, float("inf")).isfinite())
