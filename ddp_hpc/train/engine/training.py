"""Assembles a training from a spec and a recipe: model, data, optimizer, records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.patience import ask_once
from ddp_hpc.run.checkpoints.past_saves import PastSaves, read_past_saves
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import CheckpointSpec, RunSpec
from ddp_hpc.train.auto_interval import AutoInterval
from ddp_hpc.train.compare_replicas import ReplicaCheck
from ddp_hpc.train.data.loader import LoadedGlobalBatch, load_global_batches
from ddp_hpc.train.data.sample_order import Position, RankSampler, SampleOrder
from ddp_hpc.train.data.sample_records import SampleRecorder, StepObserver
from ddp_hpc.train.engine.compiled import CompiledPasses, PlainPasses
from ddp_hpc.train.engine.evaluate import Evaluator
from ddp_hpc.train.engine.nonfinite import LossWatch, UpdateGuard
from ddp_hpc.train.engine.optimizer import lr_factor, trained_parameters
from ddp_hpc.train.engine.precision import Precision, precision_text
from ddp_hpc.train.engine.prepare_model import initial_state, wrap_model
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe, did_you_mean_name
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.recording.run_recorder import RunRecorder
from ddp_hpc.train.recording.step_numbers import StepNumbers
from ddp_hpc.train.recording.step_profile import phase_timer
from ddp_hpc.train.recording.time_marks import Timeline
from ddp_hpc.train.save_plan import NO_STEP, SavePlan
from ddp_hpc.train.state import rng
from ddp_hpc.train.state.checkpoint import Checkpointer
from ddp_hpc.train.state.training_state import TrainingState
from ddp_hpc.train.stop import StopConsensus, StopFlag
from ddp_hpc.train.watchdog import Watchdog

log = logging.getLogger(__name__)


@dataclass
class Training:
    """State and collaborators of the training loop."""

    spec: RunSpec
    run: RunDir
    group: Group
    recipe: Recipe
    model: nn.Module
    """The user's model, wrapped in DDP if there are several ranks."""
    state: TrainingState
    precision: Precision
    order: SampleOrder
    total_steps: int
    base_lrs: list[float | None]
    """Peak learning rate of each parameter group; None where the optimizer chooses its own."""
    untrained: list[nn.Parameter]
    """Parameters of the model that the optimizer does not have; backward may give them gradients all the same."""
    stop_consensus: StopConsensus
    checkpointer: Checkpointer
    losses: LossWatch
    guard: UpdateGuard
    evaluator: Evaluator
    recorder: RunRecorder
    observers: list[StepObserver]
    watchdog: Watchdog
    replicas: ReplicaCheck
    numbers: StepNumbers
    save_plan: SavePlan
    passes: PlainPasses = field(default_factory=PlainPasses)
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    after_step: Callable[[], bool] | None = None
    """In a replay: called after each step; returns whether the replay ends there."""

    def global_batches(self) -> Iterator[LoadedGlobalBatch]:
        """Yield the samples of every step that is left."""
        start, rank = self.state.position, self.group.rank_info.rank
        sampler = RankSampler(order=self.order, start=start, total_steps=self.total_steps, rank=rank)
        recipe, pin_memory = self.recipe, self.group.device.type == "cuda"
        return load_global_batches(
            recipe.train_data, sampler, data=self.spec.data, pin_memory=pin_memory, collate=recipe.collate_fn
        )

    def update_total_steps(self) -> None:
        """Compute the last step again from the restored position.

        The user may have changed `train.global_batch_size` between attempts, so earlier steps may have had other sizes.
        """
        epochs = self.spec.train.epochs
        last = self.order.last_step(self.state.position, epochs=epochs)
        if last == self.order.last_step(Position(), epochs=epochs):
            return
        self.total_steps = min(self.spec.train.max_steps or NO_STEP, max(last, self.state.position.step))
        self.recorder.total_steps = self.total_steps
        log.info(
            "the batch size, `data.drop_last` or the size of the data has changed since earlier steps: "
            "%d epochs now end at step %d. You need do nothing if you meant this.",
            epochs,
            last,
        )

    def report_plan_changes(self) -> None:
        """Say what has changed since the checkpoint was saved; from now on, checkpoints have the plan of this attempt."""
        now = {"num_samples": self.order.num_samples, "total_steps": self.total_steps}
        before, self.state.plan = {**now, **self.state.plan}, now
        position, schedule, lr = self.state.position, self.spec.lr_schedule, self.spec.train.lr
        if before["num_samples"] != now["num_samples"]:
            log.warning(
                "the size of the data has changed: %d samples, and %d when step %d was saved. %s",
                now["num_samples"],
                before["num_samples"],
                position.step,
                f"Epoch {position.epoch + 1} had begun: its rest comes from a new order, in which some samples come a second time "
                "and others not at all. To use each once, restore the old data, and change it only between epochs."
                if position.samples_in_epoch
                else "You need do nothing if you meant this.",
            )
        was = lr * lr_factor(schedule, max(position.step - 1, 0), before["total_steps"])
        is_now = lr * lr_factor(schedule, position.step, now["total_steps"])
        if before["total_steps"] < now["total_steps"] and position.step and is_now > 2 * was:
            log.warning(
                "the training now ends at step %d instead of %d, and `lr_schedule.name=%s` is stretched over it: the learning rate was "
                "%.2g at step %d and goes on from %.2g. To keep the old one, set `lr_schedule.name=constant train.lr=%.2g`.",
                now["total_steps"],
                before["total_steps"],
                schedule.name,
                was,
                position.step,
                is_now,
                was,
            )

    @property
    def evaluated_model(self) -> nn.Module:
        """The model to evaluate: the moving average, if there is one."""
        return self.state.model if self.state.ema is None else self.state.ema.module


def assemble_training(  # noqa: PLR0913  it assembles these parts
    spec: RunSpec,
    recipe: Recipe,
    run: RunDir,
    group: Group,
    *,
    attempt: int,
    stop: StopFlag,
    watchdog: Watchdog | None = None,
) -> Training:
    """Assemble the parts; nothing is restored yet."""
    _check_best(spec, recipe)
    order = _order(spec, recipe, group)
    total_steps = _total_steps(spec, order)
    precision = Precision(spec.train.precision, group.device)
    log.info("precision %s; %s", precision.name, precision_text())
    state = initial_state(spec, recipe, group, order, precision)
    bare, optimizer, on_nonfinite = state.model, state.optimizer, spec.train.on_nonfinite
    phases = phase_timer(spec.profile, run, group, attempt=attempt, next_step=lambda: state.position.step + 1)
    watchdog, rank_info = watchdog or Watchdog(None), group.rank_info
    recorder = RunRecorder(run, spec, group, phases, attempt=attempt, total_steps=total_steps, order=order)
    save_plan = _save_plan(spec.checkpoint, run, group, phases, recorder.timeline, attempt=attempt)
    checkpointer = _checkpointer(spec, run, group, recorder, save_plan, attempt=attempt, stop=stop, watchdog=watchdog)
    checkpointer.check(state)
    every_steps = spec.integrity.every_steps
    replicas = ReplicaCheck(run, group, attempt=attempt, every_steps=every_steps, wait_for_save=checkpointer.wait)
    losses = LossWatch(checkpointer, replicas, state, policy=on_nonfinite)
    trained = set(trained_parameters(optimizer))
    return Training(
        spec=spec,
        run=run,
        group=group,
        recipe=recipe,
        model=wrap_model(spec, bare, group),
        state=state,
        precision=precision,
        order=order,
        total_steps=total_steps,
        base_lrs=[None if (lr := options.get("lr")) is None else float(lr) for options in optimizer.param_groups],
        untrained=[parameter for parameter in bare.parameters() if parameter not in trained],
        stop_consensus=StopConsensus(group, stop, is_fenced=partial(ownership.is_fenced, run, attempt), news=save_plan),
        checkpointer=checkpointer,
        losses=losses,
        guard=UpdateGuard(bare, is_active=on_nonfinite == "skip", end=losses.end_run),
        evaluator=Evaluator(recipe, spec, group, precision, on_batch=watchdog.feed),
        recorder=recorder,
        passes=CompiledPasses(order, rank_info.rank) if spec.train.compile else PlainPasses(),
        numbers=StepNumbers(recipe.tokens, computes_norm=spec.log.grad_norm),
        phases=phases,
        observers=[SampleRecorder(run.rank_samples(attempt, rank_info.rank))] if spec.train.record_samples else [],
        watchdog=watchdog,
        replicas=replicas,
        save_plan=save_plan,
    )


def _checkpointer(  # noqa: PLR0913  it tells these parts of its saves
    spec: RunSpec,
    run: RunDir,
    group: Group,
    recorder: RunRecorder,
    save_plan: SavePlan,
    *,
    attempt: int,
    stop: StopFlag,
    watchdog: Watchdog,
) -> Checkpointer:
    def on_result(step: int, seconds: float, error: str | None) -> None:
        save_plan.note_written(seconds if error is None else None)
        recorder.record_save(step, seconds, error)

    return Checkpointer(
        run,
        group,
        attempt=attempt,
        keep=spec.checkpoint,
        before_commit=recorder.flush,
        on_result=on_result,
        on_progress=watchdog.feed,
        on_buffers=recorder.record_save_bytes,
        is_stop_asked=partial(stop.is_set, look_at_file=group.rank_info.is_rank_zero),
    )


def _save_plan(  # noqa: PLR0913  what measures needs all of these
    spec: CheckpointSpec, run: RunDir, group: Group, phases: PhaseTimes, timeline: Timeline, *, attempt: int
) -> SavePlan:
    """Return what says when to save; with `auto`, rank zero measures."""

    def make_auto() -> AutoInterval:
        on_gpu = partial(torch.cuda.synchronize, group.device)
        read = partial(read_past_saves, run, before=attempt, now=time.time())
        return AutoInterval(
            spec,
            ask_once(run.timeline, read, unknown=PastSaves()),
            phases=phases.times_so_far,
            note=timeline.note_interval,
            wait_for_device=on_gpu if group.device.type == "cuda" else lambda: None,
        )

    measures = group.rank_info.is_rank_zero and spec.every_steps == "auto"
    return SavePlan(spec.every_steps, make_auto if measures else None, max_failing_s=spec.max_failing_s)


def _order(spec: RunSpec, recipe: Recipe, group: Group) -> SampleOrder:
    num_samples = torch.zeros(group.rank_info.world_size, dtype=torch.int64)
    num_samples[group.rank_info.rank] = len(recipe.train_data)  # type: ignore[arg-type]  # map-style data has a length
    found = group.sum(num_samples).tolist()
    if len({*found}) > 1:
        raise ConfigError(
            f"`Recipe.train_data` has {found[0]} samples on rank 0, but {next(one for one in found if one != found[0])} on another rank. Give each rank all "
            "samples: ddp-hpc itself has each rank load its share of each batch, so the recipe need not divide the data."
        )
    order = SampleOrder(
        num_samples=found[0],
        seed=spec.seed,
        global_batch_size=spec.train.global_batch_size,
        micro_batch_size=spec.train.micro_batch_size_in(group.rank_info.world_size),
        world_size=group.rank_info.world_size,
        drop_last=spec.data.drop_last,
    )
    if order.steps_per_epoch == 0:
        raise ConfigError(
            f"`train.global_batch_size` is {order.global_batch_size}, but the training data has {order.num_samples} "
            "samples, and `data.drop_last` drops an incomplete batch, so no batch is left. Choose a smaller batch, or "
            "`data.drop_last=false`."
        )
    return order


def _total_steps(spec: RunSpec, order: SampleOrder) -> int:
    last_step = order.last_step(Position(), epochs=spec.train.epochs)
    if last_step < (spec.train.max_steps or 0):
        log.warning(
            "`train.max_steps` is %d, but `train.epochs=%d` ends the training at step %d. For more steps, set more epochs, too.",
            spec.train.max_steps,
            spec.train.epochs,
            last_step,
        )
    return min(spec.train.max_steps or NO_STEP, last_step)


def _check_best(spec: RunSpec, recipe: Recipe) -> None:
    """Raise ConfigError if the best checkpoint is to be kept, but no evaluation measures it."""
    if not spec.checkpoint.keep_best:
        return
    if recipe.eval_data is None:
        raise ConfigError(
            f"`checkpoint.keep_best` is {spec.checkpoint.keep_best}, but the recipe has no `eval_data`, so nothing says which "
            "checkpoint is best. Add held-out samples, or leave `checkpoint.keep_best` out."
        )
    names = ["loss", *recipe.metrics]
    if spec.checkpoint.best_metric not in names:
        raise ConfigError(
            f"`checkpoint.best_metric` is {spec.checkpoint.best_metric!r}, but the evaluation has no such metric. "
            f"{did_you_mean_name(spec.checkpoint.best_metric, names)}"
        )


def configure_torch(spec: RunSpec) -> None:
    """Set torch's global state: the seed for building the model, the precision, and determinism."""
    rng.seed_everything("model", spec.seed)
    if spec.train.matmul_precision is not None:
        torch.set_float32_matmul_precision(spec.train.matmul_precision)
        torch.backends.cudnn.allow_tf32 = spec.train.matmul_precision != "highest"  # for convolutions, too
    torch.backends.cudnn.benchmark = not spec.train.deterministic
    if spec.train.deterministic:
        # cuBLAS needs it: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        torch.use_deterministic_algorithms(True)
