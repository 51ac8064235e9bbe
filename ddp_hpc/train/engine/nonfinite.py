"""Handles losses, gradients and weights that are not finite (`train.on_nonfinite`)."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import DivergedError
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import OnNonfinite
from ddp_hpc.train.compare_replicas import ReplicaCheck
from ddp_hpc.train.engine.optimizer import can_skip, closure_error, trained_parameters
from ddp_hpc.train.engine.set_aside import device_for_copies, values_to_keep
from ddp_hpc.train.engine.tensor_copies import CopiedTensor, Place, copy_places, places, restore, restore_where
from ddp_hpc.train.engine.value_copies import NotKeptError
from ddp_hpc.train.recording.step_numbers import gradient_norm
from ddp_hpc.train.state.checkpoint import Checkpointer, divergence_message
from ddp_hpc.train.state.training_state import TrainingState

log = logging.getLogger(__name__)

MAX_IN_A_ROW_BY_POLICY: Mapping[OnNonfinite, int] = {"stop": 5, "skip": 50}
"""Steps in a row whose loss (or skipped update) is not finite, by policy, after which the run ends as diverged."""


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


@dataclass
class LossWatch:
    """Ends a training whose losses are no longer finite.

    The loop only keeps each loss. To read one means to wait for the device, so the ranks read them all when they
    synchronise anyway (`StopConsensus`).
    """

    checkpointer: Checkpointer
    replicas: ReplicaCheck
    state: TrainingState
    _: KW_ONLY
    policy: OnNonfinite
    _steps: list[int] = field(default_factory=list)
    _losses: list[Tensor] = field(default_factory=list)
    _began: tuple[int, bool] | None = None
    """The first step of the row of bad ones, and whether this rank's loss was bad in it."""

    def __post_init__(self) -> None:
        self._limit = MAX_IN_A_ROW_BY_POLICY.get(self.policy)
        has_others = self.replicas.group.rank_info.world_size > 1
        self._may_try_again = self.policy == "stop" and self.replicas.is_on and has_others
        if self._limit is not None:
            self.checkpointer.newest_losses = self._newest_losses

    def _newest_losses(self) -> Sequence[Tensor]:
        return self._losses[bisect_left(self._steps, self._steps[-1]) :] if self._steps else []

    def note(self, step: int, loss: Tensor) -> None:
        """Keep the loss of one micro batch of `step` for the next `check`."""
        if self._limit is not None:
            self._steps.append(step)
            self._losses.append(loss)

    def check(self, *, is_last: bool = False) -> None:
        """End the run on all ranks if the losses of any rank, or weights that rank zero should save, are not finite.

        After the last step, one such loss is enough. All ranks call this after the same step.
        """
        if self._limit is None or not self._steps:
            return
        first, last = self._steps[0], self._steps[-1]
        is_bad = torch.stack(self._losses).isfinite().logical_not().cpu().long()
        # How many losses of each step are bad, and last, whether rank zero refused to save. All ranks look after the same step
        # (`StopConsensus`), so the tensor has the same length on all of them, as an all-reduce requires.
        votes = torch.zeros(last - first + 2, dtype=torch.int64)
        votes.index_add_(0, torch.tensor(self._steps) - first, is_bad)
        votes[-1] = int(self.checkpointer.refused is not None)
        own = votes.tolist()
        *num_bad, is_refused = self.replicas.group.sum(votes).tolist()
        self._steps, self._losses = [], []
        for step, count in enumerate(num_bad, first):
            if count:
                self._began = self._began or (step, bool(own[step - first]))
            else:
                self._began = None
                if self._may_try_again:
                    self.replicas.note_finite_losses(step)
            if self._began is not None and step - self._began[0] + 1 == self._limit:
                self.end_run(f"the loss is not finite since step {self._began[0]}")
        if is_last and self._began is not None and self.policy == "stop":
            self.end_run(f"the loss is not finite since step {self._began[0]}")
        if is_refused:
            self.end_run(str(self.checkpointer.refused))

    def end_run(self, what: str) -> NoReturn:
        """End the run on all ranks as diverged; or with a RanksDifferError, where that is a better reason."""
        run, group = self.replicas.run, self.replicas.group
        self.checkpointer.wait()  # commit the checkpoint that is being written: its weights are finite
        self.replicas.compare(self.state)
        if self._may_try_again and self._began is not None:
            step, is_mine = self._began
            what += self.replicas.nonfinite_ranks_text(step, is_mine=is_mine)
        text = divergence_message(run, what) if group.rank_info.is_rank_zero else None
        raise DivergedError(group.broadcast_last_word("diverged", text))


def explain_nan_check(error: BaseException, run: RunDir, *, rank: int, step: int) -> DivergedError | None:
    """Return what an error of PyTorch's check for NaN means (`debug.nan`); None for any other error.

    PyTorch has no type for it: c10d raises a plain RuntimeError, on the rank alone whose own tensor has the NaN.
    """
    if not isinstance(error, RuntimeError) or "NaN found in input tensor" not in str(error):
        return None
    what = f"what rank {rank} had computed itself has a NaN, in step {step + 1}, before the ranks exchanged it"
    return DivergedError(divergence_message(run, what))


@dataclass
class UpdateGuard:
    """With the policy `skip`, skips updates whose gradients are not finite; with fp16 the loss scaler skips them.

    The host waits for the device in the first step of an attempt, to see what the forward changes. In later ones it does so only
    where the optimizer has no kernels that leave an update out, or where the forward changes more than tensors.
    """

    model: nn.Module
    _: KW_ONLY
    is_active: bool
    end: Callable[[str], object]
    """Ends the run on all ranks, for a reason."""
    why_waits: str = "the first step is watched"
    """Why the host waits for the device in each step; empty if it does not."""
    _places: list[Place] | None = None
    _copies: list[CopiedTensor] = field(default_factory=list)
    _attributes: dict[str, tuple[list[object], list[int]]] = field(default_factory=dict)
    _keeps_attributes: bool = True
    _not_kept: str = ""
    _restores: Sequence[Callable[[], object]] = ()
    _noted: list[tuple[int, Tensor]] = field(default_factory=list)
    _num_skipped: int = 0
    _num_in_a_row: int = 0
    _last_word: str = ""
    """Why the run ends at the next check."""

    def keep_values(self) -> None:
        """Copy what the forward may change, to put it back if the update is skipped."""
        if self._places is None:  # a copy of the weights, beside the optimizer's state
            self._attributes = _attributes(self.model)
            weights = [*self.model.parameters()]
            copies_on = device_for_copies(weights, weights[0].device) if weights else None
            self._copies = copy_places(places(self.model), copies_on=copies_on)
        else:
            self._copies = copy_places(self._places)
        if self._keeps_attributes:
            try:
                self._restores = values_to_keep(self.model, ()).copy_for_restore()
            except NotKeptError as error:
                self._not_kept = str(error)

    def step(self, optimizer: torch.optim.Optimizer, step: int) -> Tensor | int:
        """Step the optimizer unless the update is to be skipped; return 1 if it is, as a tensor if the host does not know."""
        if not self.is_active:
            _step(optimizer)
            return 0
        # DDP has all-reduced the gradients, so they and the answer are the same on all ranks. If one rank skipped
        # alone, its weights would differ from then on.
        is_bad = _nonfinite_flag(optimizer)
        self._noted.append((step, is_bad))
        is_skipped = self.put_back_if(is_bad, optimizer)
        if is_skipped is None:
            vars(optimizer).update(grad_scale=None, found_inf=is_bad)  # as `GradScaler` gives it
            _step(optimizer)
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            return is_bad
        self._count()
        if not is_skipped:
            _step(optimizer)
        return int(is_skipped)

    def put_back_if(self, is_bad: Tensor, optimizer: torch.optim.Optimizer) -> bool | None:
        """Put back what the forward has changed if `is_bad` is not 0; return whether it is, None where the host does not know."""
        found, restores, self._copies, self._restores = self._copies, self._restores, [], ()
        waits = self.why_waits or not all(one.can_restore_where(is_bad.device) for one in found)
        if self._places is None:
            self._see_changes(optimizer, found)
        if not waits:
            restore_where(found, is_bad.bool())
            return None
        if not is_bad:
            return False
        restore(found)
        for put_back in restores:
            put_back()
        return True

    def _see_changes(self, optimizer: torch.optim.Optimizer, found: Sequence[CopiedTensor]) -> None:
        """See in the first step what the forward changes: besides the buffers, perhaps parameters, or attributes of modules."""
        self._places = [
            (one.module, one.name) for one in found if not isinstance(one.tensor, nn.Parameter) or one.is_changed()
        ]
        before = {key: signs for key, (_, signs) in self._attributes.items()}
        changed = [key for key, (_, signs) in _attributes(self.model).items() if signs != before.get(key)]
        self.why_waits = ""
        if changed:
            self.why_waits = f"the forward changes `{changed[0]}`, which is neither a buffer nor a parameter"
        elif not can_skip(optimizer):
            self.why_waits = f"the optimizer ({type(optimizer).__name__}) has no fused kernels that leave an update out"
        if self.why_waits and any(one.is_cuda for one in self.model.parameters()):
            log.info("`train.on_nonfinite=skip` waits for the device in each step: %s", self.why_waits)
        if changed and self._not_kept:
            log.warning("a skipped update puts back tensors alone (`train.on_nonfinite=skip`): %s", self._not_kept)
        self._keeps_attributes = bool(changed) and not self._not_kept

    def check(self) -> None:
        """Count the updates that were skipped since the last check, which waits for the device; all ranks call this after the same step."""
        self._count()
        if self._last_word:
            self.end(self._last_word)

    def _count(self) -> None:
        noted, self._noted = self._noted, []
        flags = torch.stack([is_bad for _, is_bad in noted]).tolist() if noted else []
        for (step, _), is_bad in zip(noted, flags, strict=True):
            self._num_in_a_row = self._num_in_a_row + 1 if is_bad else 0
            if is_bad:
                self._warn(step)
            if self._num_in_a_row >= MAX_IN_A_ROW_BY_POLICY["skip"] and not self._last_word:
                self._last_word = f"the gradients are not finite since step {step - self._num_in_a_row + 1}"

    def _warn(self, step: int) -> None:
        self._num_skipped += 1
        if self._num_skipped.bit_count() == 1:  # log the 1st, 2nd, 4th, 8th, ...
            log.warning(
                "the gradients of step %d are not finite, so its update is skipped (`train.on_nonfinite`): "
                "%d skipped since this attempt began. The training goes on, until %d in a row are skipped.",
                step,
                self._num_skipped,
                MAX_IN_A_ROW_BY_POLICY["skip"],
            )


def _step(optimizer: torch.optim.Optimizer) -> None:
    try:
        optimizer.step()
    except (AssertionError, TypeError, RuntimeError, ValueError) as error:
        if "closure" in str(error):
            raise closure_error(optimizer) from error
        raise


_CONTAINERS = (list, dict, set, deque)


def _attributes(model: nn.Module) -> dict[str, tuple[list[object], list[int]]]:
    """Return what a module's forward may change besides buffers and parameters: its own attributes with what is in containers.

    Each as objects, which are kept so that no other object gets the identity of one of them, and numbers by which a change shows.
    """
    found = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _MODULE_ATTRIBUTES:
                continue
            held = [value, *(value if isinstance(value, _CONTAINERS) else ())]
            held += value.values() if isinstance(value, dict) else ()
            version = value._version if isinstance(value, Tensor) else 0  # noqa: SLF001
            found[f"{name}.{key}".lstrip(".")] = held, [*map(id, held), version]
    return found


def _nonfinite_flag(optimizer: torch.optim.Optimizer) -> Tensor:
    """Return, on the device, 1 if a gradient is not finite, else 0."""
    return gradient_norm(trained_parameters(optimizer), None, kind=float("inf")).isfinite().logical_not().float()
