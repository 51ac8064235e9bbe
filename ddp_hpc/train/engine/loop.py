"""The training loop, on one page: restore, step, maybe evaluate, maybe save, maybe stop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ddp_hpc.base.errors import StopAskedError
from ddp_hpc.train.data.loader import FetchedBatch, LoadedGlobalBatch, to_device
from ddp_hpc.train.data.sample_order import GlobalBatch, MicroBatch
from ddp_hpc.train.engine.batch_norm_check import clearer_error
from ddp_hpc.train.engine.ddp_warmup import copy_batch, explain_unused, warm_up_ddp
from ddp_hpc.train.engine.optimizer import lr_factor, set_rates, trained_parameters
from ddp_hpc.train.engine.set_aside import undo_trial
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.engine.weighted_loss import compute_loss, divide_by_weight, num_parts_of, warn_of_no_mean
from ddp_hpc.train.recording.step_numbers import gradient_norm
from ddp_hpc.train.state.initial_weights import take_initial_weights

log = logging.getLogger(__name__)


def train(t: Training) -> bool:
    """Train from the newest checkpoint to the last step; return whether it was reached (if not, the run was stopped).

    A replay ends at its own last step, without an evaluation.
    """
    try:
        restore(t)
    except StopAskedError:
        log.info("stopped as asked before the first step; nothing was saved, because nothing is new")
        t.group.wait_until_all_read("stopped")
        return False
    metrics: Mapping[str, float] = {}
    due = 0
    for plan, loaded in batches_after_warmup(t, t.global_batches()):
        accumulate_gradients(t, plan, loaded)
        update_weights(t)
        position = t.state.position = plan.after
        step, ends_epoch = position.step, position.samples_in_epoch == 0
        if step < due and not ends_epoch:  # so most steps end
            t.phases.enter("data")
            continue

        t.phases.enter("other")
        t.guard.check()
        t.checkpointer.check_after_first_step(t.state, will_save=t.after_step is None)
        is_last = step == t.total_steps
        if is_last or step % t.spec.log.every_steps == 0:
            log_loss(t)
        if t.after_step is not None and t.after_step():
            t.recorder.record_progress(position, now=True)
            return True
        metrics = evaluate(t) if is_last or (ends_epoch and position.epoch % t.spec.eval.every_epochs == 0) else {}
        if is_last:
            break
        if t.save_plan.is_due(step) or (metrics and t.spec.checkpoint.keep_best):
            save(t, metrics)
        t.replicas.compare_due(t.state)
        if step >= t.stop_consensus.next_step:
            t.losses.check()
            if t.stop_consensus.agree_to_stop(step):
                break
            t.recorder.record_progress(position)
            t.watchdog.feed()
        due = next_due(t, step)
        t.phases.enter("data")
    return finish(t, metrics)


def restore(t: Training) -> None:
    """Restore the newest valid checkpoint, if there is one, and open the records at its step.

    Raises:
        StopAskedError: on all ranks, if one of them was asked to stop.
    """
    t.watchdog.feed()
    step = t.checkpointer.restore_newest(t.state, seed=t.spec.seed)
    t.update_total_steps()
    t.report_plan_changes()
    t.evaluator.start(t.evaluated_model)
    if step is None:
        take_initial_weights(t.spec, t.state, t.group, t.watchdog.feed)
        log.info("training from the beginning, to step %d", t.total_steps)
    else:
        log.info("resumed at step %d of %d", step, t.total_steps)
        t.recorder.record_resume(step)
        if t.state.loss_steps:
            t.numbers.note_resume_between_lines()
    t.recorder.open(t.state.position)
    if t.spec.train.on_nonfinite != "ignore":
        t.checkpointer.refuse_nonfinite(t.state.model)
    functions = {"loss": t.recipe.loss, "inputs_and_targets": t.recipe.inputs_and_targets, "metrics": t.recipe.metrics}
    t.checkpointer.watch(t.state, **functions)
    t.replicas.compare(t.state)
    t.save_plan.begin(t.state.position.step)
    t.watchdog.feed()
    if t.stop_consensus.agree_before_first_step(t.state.position.step):
        raise StopAskedError("The ranks were asked to stop before the first step.")


def next_due(t: Training, step: int) -> int:
    """Return the first step after `step` at which more is due than to train; the end of an epoch may come before."""
    if t.after_step is not None:
        return step + 1
    log_every = t.spec.log.every_steps
    return min(
        (step // log_every + 1) * log_every,
        t.save_plan.next_step(step),
        t.replicas.next_step,
        t.stop_consensus.next_step,
        t.total_steps,
    )


def finish(t: Training, metrics: Mapping[str, float]) -> bool:
    """Save the state after the newest step, and return whether that was the last one of the training."""
    t.watchdog.feed()
    t.losses.check(is_last=t.state.position.step >= t.total_steps)
    t.phases.enter("checkpoint")
    with t.recorder.exclude_from_rates():
        t.replicas.compare(t.state)
        t.checkpointer.check_again(t.state)
        t.checkpointer.save_and_wait(t.state, metrics=metrics)
    t.phases.enter("other")
    t.recorder.record_progress(t.state.position, now=True)
    return t.state.position.step >= t.total_steps


def batches_after_warmup(t: Training, global_batches: Iterator[LoadedGlobalBatch]) -> Iterator[LoadedGlobalBatch]:
    """Return the global batches, after one backward pass on the first micro batch that changes nothing (`ddp_warmup`).

    One worker does it only where a batch is computed in parts, to check the loss.
    """
    has_parts = t.order.micro_batch_size < t.order.global_batch_size
    if not has_parts or (batch := next(global_batches, None)) is None:
        return global_batches
    plan, loaded = batch
    first, device, state = next(loaded), t.group.device, t.state
    called = (t.recipe.loss, t.recipe.inputs_and_targets)
    least = min(t.order.micro_batch_size, plan.num_samples // t.group.rank_info.world_size)
    once = partial(backward, t, copy_batch(first), plan.micro_batches[0], plan, num_parts=num_parts_of(least))
    with t.passes.warmup_context():
        if t.group.rank_info.world_size > 1:
            state.gradient_order = warm_up_ddp(state.model, t.model, called, device, once, order=state.gradient_order)
        else:
            with undo_trial(state.model, called, device):
                once()
    t.phases.enter("data")
    return chain([(plan, chain([first], loaded))], global_batches)


def accumulate_gradients(t: Training, whole: GlobalBatch, loaded: Iterator[FetchedBatch]) -> None:
    """Add up the gradients of the mean loss of a global batch; DDP all-reduces them once, in the last micro step."""
    state, last = t.state, whole.micro_batches[-1]
    if t.guard.is_active:
        t.guard.keep_values()
    weighted: list[Tensor] = []
    for plan, fetched in zip(whole.micro_batches, loaded, strict=True):
        if plan is last:
            loss, weight = backward(t, fetched, plan, whole)
        else:
            with without_sync(t):
                loss, weight = backward(t, fetched, plan, whole)
            t.phases.enter("data")
        if weight is None:
            state.loss_meter.add_(loss, alpha=plan.num_real / whole.num_samples)
        else:
            weighted.append(torch.stack([loss.double(), weight]) * bool(plan.num_real))
        t.losses.note(whole.after.step, loss)
        for observer in t.observers:
            observer.note(plan, fetched.indices)
        if t.numbers.count_tokens is not None and plan.num_real:
            t.numbers.note_tokens(fetched.batch)
    if weighted:
        own = torch.stack(weighted).sum(0)
        state.loss_meter.add_(divide_by_weight(own, whole.num_samples, trained_parameters(state.optimizer), t.group))
    state.loss_steps += 1
    for observer in t.observers:
        observer.record(whole)


def without_sync(t: Training) -> AbstractContextManager[Any]:
    """Accumulate gradients without the all-reduce."""
    # Each backward of DDP all-reduces all gradients. In `no_sync` it only adds them up locally; the first backward outside
    # of it all-reduces the sum: https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    return t.model.no_sync() if t.group.rank_info.world_size > 1 else nullcontext()  # type: ignore[operator]  # DDP's


def backward(
    t: Training, fetched: FetchedBatch, plan: MicroBatch, global_batch: GlobalBatch, *, num_parts: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Run forward and backward on one micro batch, weighted by its share of the global batch; return its mean loss and None, or its sum and weight.

    With `num_parts`, check first whether the loss is that of so many parts.
    """
    batch = fetched.batch
    if t.group.device.type != "cpu" or t.spec.train.channels_last:
        t.phases.enter("host to device")
        batch = to_device(batch, t.group.device, channels_last=t.spec.train.channels_last)
    t.phases.enter("forward")
    inputs, targets = t.recipe.inputs_and_targets(batch)
    try:
        with t.precision.autocast(), t.passes.forward_context(plan):
            outputs = t.model(inputs)
            if num_parts:
                warn_of_no_mean(t.recipe.loss, outputs, targets, num_parts)
                torch.clear_autocast_cache()  # PyTorch 2.6 keeps casts without a gradient: https://github.com/pytorch/pytorch/issues/112583
            loss, weight = compute_loss(t.recipe.loss, outputs, targets)
    except Exception as error:
        if (clearer := clearer_error(error, plan, global_batch) or explain_unused(error, t.state.model)) is not None:
            raise clearer from error
        raise
    # DDP averages the gradients over the ranks, so the loss is multiplied by their number. The sum over all micro batches of
    # all ranks is then the gradient of the mean over the global batch, also when ranks have different numbers of samples.
    num = plan.num_real if weight is None else bool(plan.num_real)
    share = num * t.group.rank_info.world_size / global_batch.num_samples
    shared = loss if share == 1 else loss * share
    t.phases.enter("backward")
    (shared if t.state.scaler is None else t.state.scaler.scale(shared)).backward()
    return loss.detach(), weight


def update_weights(t: Training) -> None:
    """Set the learning rate, clip, step the optimizer, drop the gradients; then update the moving average."""
    t.phases.enter("optimizer")
    optimizer, scaler = t.state.optimizer, t.state.scaler
    step = t.state.position.step
    factor, last = (lr_factor(t.spec.lr_schedule, one, t.total_steps) for one in (step, max(0, step - 1)))
    set_rates(optimizer, t.base_lrs, factor, last if t.phases.num_steps else None)
    if t.spec.train.grad_clip_norm is not None:
        # Unscale first, else the limit would apply to gradients that are multiplied by the loss scale:
        # https://pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
        if scaler is not None:
            scaler.unscale_(optimizer)
        t.numbers.note_norm(torch.nn.utils.clip_grad_norm_(trained_parameters(optimizer), t.spec.train.grad_clip_norm))
    elif t.numbers.computes_norm and is_logged(t, t.state.position.step + 1):
        t.numbers.note_norm(gradient_norm(trained_parameters(optimizer), scaler))
    if scaler is None:
        t.numbers.note_skipped(t.guard.step(optimizer, t.state.position.step + 1))
    else:
        scaler.step(optimizer)
        # No public way to know it leaves the device alone: https://github.com/pytorch/pytorch/blob/main/torch/amp/grad_scaler.py
        for was_skipped in scaler._found_inf_per_device(optimizer).values():  # noqa: SLF001  1 or 0, until `update`
            t.numbers.note_skipped(was_skipped)
            if t.guard.is_active:
                t.guard.put_back_if(was_skipped, optimizer)
        scaler.update()
    optimizer.zero_grad()
    for parameter in t.untrained:
        parameter.grad = None
    if t.state.ema is not None:
        t.state.ema.update(t.state.model)
    t.phases.num_steps += 1


def log_loss(t: Training) -> None:
    """Write the mean loss over the steps since the last log line, and what was noted of them; only here does the loop itself wait for the device."""
    # The loss meter is part of the training state, so a resumed run writes the same lines as an unbroken one. For a run that
    # is extended after its end, the extra line at that end must not reset the meter.
    loss = t.group.sum(t.state.loss_meter.double()).item() / t.state.loss_steps
    if t.state.position.step % t.spec.log.every_steps == 0:
        t.state.loss_meter.zero_()
        t.state.loss_steps = 0
    t.recorder.record_training(
        t.state.position,
        loss=loss,
        lr=t.state.optimizer.param_groups[0].get("lr"),
        more=t.numbers.take(t.state.scaler, may_skip=t.spec.train.on_nonfinite == "skip"),
        num_tokens=t.numbers.take_num_tokens(t.recorder.take_num_samples(t.state.position), t.group.sum),
    )


def is_logged(t: Training, step: int) -> bool:
    """Tell whether the metrics get a line after `step`."""
    return step % t.spec.log.every_steps == 0 or step == t.total_steps


def save(t: Training, metrics: Mapping[str, float]) -> None:
    """Copy the state after the last step; it is committed while the training goes on, or at once where saves have failed for too long."""
    with t.save_plan.count_from_save(t.state.position.step):
        t.phases.enter("checkpoint")
        t.replicas.compare(t.state)
        t.checkpointer.check_again(t.state)
        if t.save_plan.is_last_try:
            t.checkpointer.save_and_wait(t.state, metrics=metrics, or_end=True)
        else:
            t.checkpointer.save(t.state, metrics=metrics)
        t.phases.enter("other")


def evaluate(t: Training) -> dict[str, float]:
    """Evaluate the weights (or their moving average) on the held-out samples, and record the metrics."""
    t.phases.enter("evaluation")
    with t.recorder.exclude_from_rates():
        metrics = t.evaluator.evaluate(t.evaluated_model)
    t.recorder.record_evaluation(t.state.position, metrics)
    t.phases.enter("other")
    return metrics
