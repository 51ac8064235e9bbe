"""One forward and backward pass before the first step, so that a resumed run repeats its steps bit by bit.

The warm-up leaves nothing behind: no optimizer steps, and all that the pass has changed in the model is put back.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hpc.base.errors import ConfigError, text_of
from ddp_hpc.base.names import shorten_names
from ddp_hpc.train.engine.set_aside import undo_trial

log = logging.getLogger(__name__)

T = TypeVar("T")


def copy_batch(batch: T) -> T:
    """Return a deep copy of a batch, because the forward pass may change its inputs in place."""
    try:
        return copy.deepcopy(batch)
    except Exception as error:  # noqa: BLE001  a user's object may raise anything
        log.warning(
            "The first batch of an attempt is used twice, to warm up DDP and to train, but it cannot be copied (%s: %s). If "
            "the model changes its inputs in place, the first step trains on the changed inputs. Change no inputs in place, or make the batch of types that `copy.deepcopy` copies.",
            type(error).__name__,
            error,
        )
        return batch


def warm_up_ddp(  # noqa: PLR0913  each is one thing of the pass
    model: nn.Module,
    wrapped: nn.Module,
    called: Iterable[object],
    device: torch.device,
    backward: Callable[[], object],
    *,
    order: list[int] | None = None,
) -> list[int]:
    """Run `backward` (forward and backward through DDP), then restore what it changed of the model and of what it `called`.

    Return the order in which the model's parameters got their gradients, for the next attempt: DDP then fills its buckets in this `order`.
    """
    # DDP all-reduces gradients in buckets. For the first backward pass it fills the buckets in the reverse order of
    # `model.parameters()`; before the second forward pass it rebuilds them, once, in the order in which gradients really
    # became ready on rank zero: https://pytorch.org/docs/stable/notes/ddp.html#internal-design
    # The buckets decide in which order the numbers of the ranks are added, and a sum of floats depends on that order. So
    # without a warm-up, the first step after a resume would differ from the same step of an unbroken run in the last bits,
    # with three or more ranks. Where data or chance decide the order of the gradients, a later attempt would find another one than
    # the first: so it is kept. With `find_unused_parameters`, DDP never rebuilds its buckets.
    parameters = [one for one in model.parameters() if one.requires_grad]
    is_kept = order is not None and sorted(order) == [*range(len(parameters))]
    with undo_trial(model, called, device):
        if is_kept and isinstance(wrapped, DistributedDataParallel) and not wrapped.find_unused_parameters:
            with wrapped.no_sync():
                ready = _ready_order(parameters, backward, drops=True)
            wrapped.require_forward_param_sync = True  # as after a pass with an all-reduce
            wrapped.reducer.prepare_for_backward([])
            for number in order or ():
                if number in ready:  # if not, DDP says so in the next forward
                    zeros = torch.zeros_like(parameters[number])
                    parameters[number].backward(zeros.to_sparse(1) if ready[number] else zeros)
            return [*(order or ())]
        return [*_ready_order(parameters, backward, drops=False)]


def _ready_order(parameters: Sequence[nn.Parameter], backward: Callable[[], object], *, drops: bool) -> dict[int, bool]:
    """Return which parameters get a gradient, in this order, and whether it is sparse; `drops` frees each at once."""
    ready: dict[int, bool] = {}

    def note(number: int, parameter: Tensor) -> None:
        ready.setdefault(number, parameter.grad is not None and parameter.grad.is_sparse)
        if drops:
            parameter.grad = None

    hooks = [one.register_post_accumulate_grad_hook(partial(note, number)) for number, one in enumerate(parameters)]
    try:
        backward()
    finally:
        for hook in hooks:
            hook.remove()
    return ready


_UNUSED_ERROR_PATTERN = re.compile(
    r"Expected to have finished reduction in the prior iteration(?:.*for rank \d+: ([\d ]+))?", re.DOTALL
)
_TWICE_ERROR_PATTERN = re.compile(r"Expected to mark a variable ready only once.*Parameter at index (\d+)", re.DOTALL)


def explain_unused(error: Exception, model: nn.Module) -> ConfigError | None:
    """For DDP's error on parameters without a gradient, or with two, return one that names them and the key that helps; else None."""
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    if twice := _TWICE_ERROR_PATTERN.search(text_of(error)):
        return ConfigError(
            f"The last backward pass gave a gradient to `{names[int(twice[1])]}` twice. With `train.find_unused_parameters=true`, a weight that the "
            "loss alone uses gets two: leave that key out, or call the loss in forward. Without it, `torch.utils.checkpoint` does that: set `use_reentrant=False`."
        )
    if (found := _UNUSED_ERROR_PATTERN.search(text_of(error))) is None:
        return None
    missing = [f"`{names[number]}`" for number in map(int, (found[1] or "").split()) if number < len(names)]
    return ConfigError(
        f"The last backward pass gave no gradient to {shorten_names(missing, 5) or 'some parameters'}, and "
        "DDP waits for one of each parameter. If forward does not use them in each pass, set "
        "`train.find_unused_parameters=true`; if it never does, remove them, or call `requires_grad_(False)` on them."
    )
