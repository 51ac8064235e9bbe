"""The training loop, on one page: restore, step, maybe evaluate, maybe save, maybe stop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.train.data_order import MicroBatch, Window
from ddp_hpc.train.initial_weights import take_initial_weights
from ddp_hpc.train.loader import Fetched, LoadedWindow, to_device
from ddp_hpc.train.lr_schedule import lr_factor
from ddp_hpc.train.optimizer import trained_parameters
from ddp_hpc.train.rehearsal import copied, rehearse
from ddp_hpc.train.single_samples import single_samples_explained
from ddp_hpc.train.training import Training

log = logging.getLogger(__name__)

_AS_USUAL = nullcontext()


def train(t: Training) -> bool:
    """Walk from the newest checkpoint to the last step; return whether it was reached (else: told to stop)."""
    restore(t)
    metrics: Mapping[str, float] = {}
    for window in rehearsed(t, t.windows()):
        accumulate_gradients(t, window)
        update_weights(t)
        t.state.position = window.plan.after
        t.journal.count(window.plan.num_samples)

        step, is_last = t.state.position.step, t.state.position.step == t.total_steps
        if is_last or step % t.spec.log.every_steps == 0:
            log_loss(t)
        metrics = evaluate(t) if is_last or is_evaluation_due(t) else {}
        if is_last:
            break
        if is_save_due(t) or (metrics and t.spec.checkpoint.keep_best):
            t.checkpointer.save(t.state, metrics=metrics)
        if t.meetings.is_due(step):
            t.losses.look()
            if t.meetings.agree_to_stop(step):
                break
            t.journal.progress(t.state.position)
            t.watchdog.feed()
    t.watchdog.feed()
    t.losses.look(is_last=t.state.position.step >= t.total_steps)
    with t.journal.paused():
        t.checkpointer.save_and_wait(t.state, metrics=metrics)
    t.journal.progress(t.state.position, now=True)
    return t.state.position.step >= t.total_steps


def restore(t: Training) -> None:
    """Bring back the newest checkpoint that holds, if there is one, and open the records where it stands."""
    t.watchdog.feed()
    step = t.checkpointer.restore_newest(t.state, seed=t.spec.seed)
    t.plan_steps()
    t.checkpointer.await_all_restored()
    t.evaluator.start(t.evaluated_model)
    if step is None:
        take_initial_weights(t.spec, t.state, t.group)
        log.info("training from the beginning, to step %d", t.total_steps)
    else:
        log.info("resumed at step %d of %d", step, t.total_steps)
        t.journal.resumed(step)
    t.journal.open(t.state.position)
    if t.spec.train.on_nonfinite != "ignore":
        t.checkpointer.refuse_nonfinite(t.state.model)
    t.watchdog.feed()


def rehearsed(t: Training, windows: Iterator[LoadedWindow]) -> Iterator[LoadedWindow]:
    """Yield the windows, after one backward on the first micro batch that leaves no trace (see `rehearsal`)."""
    if t.group.place.world_size > 1:
        for window in windows:
            first, plan = next(window.fetched), window.plan
            rehearse(
                t.state.model,
                t.group.device,
                lambda: backward(t, copied(first), plan.micro_batches[0], plan),  # noqa: B023
            )
            yield LoadedWindow(plan, chain([first], window.fetched))
            break
    yield from windows


def accumulate_gradients(t: Training, window: LoadedWindow) -> None:
    """Add up the gradients of a window's mean loss; the ranks exchange them once, in the last micro step."""
    last = window.plan.micro_batches[-1]
    t.guard.keep_buffers()
    for plan, fetched in zip(window.plan.micro_batches, window.fetched, strict=True):
        with _AS_USUAL if plan is last else without_exchange(t):
            loss = backward(t, fetched, plan, window.plan)
        t.state.loss_meter.add_(loss, alpha=plan.num_real / window.plan.num_samples)
        t.losses.note(t.state.position.step + 1, loss)
        t.samples.note(plan, fetched.indices)
    t.state.loss_steps += 1
    t.samples.record(window.plan)


def without_exchange(t: Training) -> AbstractContextManager[Any]:
    """Keep gradients to this rank for now."""
    return t.model.no_sync() if t.group.place.world_size > 1 else _AS_USUAL  # type: ignore[operator]  # DDP's


def backward(t: Training, fetched: Fetched, plan: MicroBatch, window: Window) -> Tensor:
    """Go forward and backward through one micro batch, weighted by its share of the window; return its mean loss.

    DDP takes the mean over the ranks, so a rank's loss is scaled by their number: the sum over all micro batches of all
    ranks is then the gradient of the mean over the window's samples, however unevenly they are spread.
    """
    batch = to_device(fetched.batch, t.group.device, channels_last=t.spec.train.channels_last)
    inputs, targets = t.recipe.inputs_and_targets(batch)
    with t.precision.autocast(), single_samples_explained(plan, window):
        loss = t.recipe.loss(t.model(inputs), targets)
    weight = plan.num_real * t.group.place.world_size / window.num_samples
    weighted = loss if weight == 1 else loss * weight
    (weighted if t.state.scaler is None else t.state.scaler.scale(weighted)).backward()
    return loss.detach()


def update_weights(t: Training) -> None:
    """Set the learning rate, clip, step the optimizer, drop the gradients; then move the average."""
    optimizer, scaler = t.state.optimizer, t.state.scaler
    factor = lr_factor(t.spec.lr_schedule, t.state.position.step, t.total_steps)
    for options, base_lr in zip(optimizer.param_groups, t.base_lrs, strict=True):
        options["lr"] = base_lr * factor
    if t.spec.train.grad_clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained_parameters(optimizer), t.spec.train.grad_clip_norm)
    t.checkpointer.hold_back_updates()
    if scaler is None:
        if not t.guard.skips(optimizer, t.state.position.step + 1):
            optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    drop_gradients(t)
    if t.state.ema is not None:
        t.state.ema.update_parameters(t.state.model)  # type: ignore[operator]  # AveragedModel's


def drop_gradients(t: Training) -> None:
    """Drop the gradients of all of the model's parameters, also of those that the optimizer does not have."""
    t.state.optimizer.zero_grad()
    for parameter in t.untrained:
        parameter.grad = None


def log_loss(t: Training) -> None:
    """Write the mean loss over the steps since the last log line; the only place where the loop waits for the device.

    The meter is part of the training state, so a resumed run writes what the unbroken one would have. So does a run that
    goes on after it was finished: the line at its end leaves the meter as it is, unless a line was due there anyway.
    """
    loss = t.group.sum(t.state.loss_meter.double()).item() / t.state.loss_steps
    if t.state.position.step % t.spec.log.every_steps == 0:
        t.state.loss_meter.zero_()
        t.state.loss_steps = 0
    t.journal.train(t.state.position, loss=loss, lr=t.state.optimizer.param_groups[0]["lr"])


def is_evaluation_due(t: Training) -> bool:
    """Tell whether the step just done ends an epoch that is to be judged."""
    position = t.state.position
    return position.samples_in_epoch == 0 and position.epoch % t.spec.eval.every_epochs == 0


def is_save_due(t: Training) -> bool:
    """Tell whether a periodic checkpoint belongs after the step just done."""
    every = t.spec.checkpoint.every_steps
    return every is not None and t.state.position.step % every == 0


def evaluate(t: Training) -> dict[str, float]:
    """Judge the weights (their average, where there is one) on the held-out samples, and write it down."""
    with t.journal.paused():
        metrics = t.evaluator.evaluate(t.evaluated_model)
    t.journal.evaluated(t.state.position, metrics)
    return metrics
