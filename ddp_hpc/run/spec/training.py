"""Training by a recipe: what to train, how, and what to keep of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.spec.checked import CheckedSpec, require

OnNonfinite = Literal["stop", "skip", "ignore"]
RecorderName = Literal["tensorboard", "wandb", "mlflow"]
"""Also the name of the module that each needs, and of the extra that installs it."""


@dataclass(frozen=True, kw_only=True)
class RecipeSpec(CheckedSpec, section="recipe"):
    """What to train."""

    target: str = "image_classification"
    """A function that returns a `Recipe` (`my_module:build`), or the name of a built-in recipe (`image_classification`)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the function of `recipe.target` (`recipe.args.width=32`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, function = self.target.partition(":")
        require(
            all(part.isidentifier() for part in module.split(".")) and (not function or function.isidentifier()),
            f"`recipe.target` is {self.target!r}, but it must be `module:function` or the name of a built-in recipe: `image_classification`.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainSpec(
    CheckedSpec,
    section="train",
    above_zero=("epochs", "max_steps", "global_batch_size", "micro_batch_size", "lr", "grad_clip_norm"),
):
    """How long to train, and with which hyperparameters."""

    epochs: int = 10
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even within an epoch."""
    global_batch_size: int = 64
    """Samples of one optimizer step, over all workers and micro batches; it does not change with the number of workers."""
    micro_batch_size: int | None = None
    """Samples in one forward and backward pass of a worker, which accumulates gradients up to the global batch.
    Unset: the worker's whole share of the global batch, in one pass."""
    lr: float = 0.1
    """Peak learning rate."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the forward and backward passes (autocast); fp16 scales the loss. Weights stay in fp32."""
    matmul_precision: Literal["highest", "high", "medium"] | None = None
    """Precision of float32 matrix products, as in `torch.set_float32_matmul_precision`. `highest` turns TF32 off, also for
    convolutions; the others turn it on. Unset: as PyTorch has it, which is TF32 in convolutions only; a run that has a checkpoint
    keeps what it was trained with."""
    grad_clip_norm: float | None = None
    """Clip the total norm of the gradients that the optimizer uses to this value."""
    on_nonfinite: OnNonfinite = "stop"
    """What to do when the loss is not finite: `stop` ends the run as failed after 5 such steps in a row; `skip` skips
    updates whose gradients are not finite, and ends the run as failed after 50 in a
    row; `ignore` continues."""
    init_from: str | None = None
    """Load these weights before step 0: a `.safetensors` or `.pt` file, the name or directory of another run, or the directory
    of a checkpoint."""
    init_strict: bool = True
    """Refuse `train.init_from` if a weight is missing, unknown or of another shape. If false, only the weights that fit are loaded."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, and evaluate with it. After n updates, the decay is
    (1 + n) / (10 + n) where that is smaller."""
    sync_batch_norm: bool = False
    """Compute batch-norm statistics over all workers (GPUs only)."""
    find_unused_parameters: bool = False
    """Allow parameters that get no gradient in some backward passes (slower)."""
    compile: bool = False
    """Compile the training's passes with `torch.compile`; incomplete batches and evaluations run without it."""
    channels_last: bool = False
    """Keep 4-D weights and inputs in channels-last memory format, which is faster for convolutions on GPUs."""
    deterministic: bool = False
    """Use deterministic algorithms only; on GPUs, a resumed run needs this to give exactly the same bits."""
    record_samples: bool = False
    """Write the sample ids of every step to `samples/`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"`train.ema_decay` is {self.ema_decay!r}, but it must be between 0 and 1.",
        )

    def micro_batch_size_in(self, world_size: int) -> int:
        """Return the samples in one forward and backward pass of a worker, where so many workers train."""
        return self.micro_batch_size or self.global_batch_size // world_size


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(CheckedSpec, section="optimizer", not_negative=("weight_decay",)):
    """The optimizer, if the recipe does not define one."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Use Nesterov momentum (SGD)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-8
    """Term added to AdamW's denominator."""
    weight_decay: float = 5e-4
    """Weight decay; biases and normalisation parameters (1-D or scalar) are never decayed."""


@dataclass(frozen=True, kw_only=True)
class LrScheduleSpec(CheckedSpec, section="lr_schedule", not_negative=("warmup_steps",)):
    """The learning rate over the steps, as a factor of `train.lr`."""

    name: Literal["cosine", "step", "constant"] = "cosine"
    """`cosine`: down to `min_factor` at the last step; `step`: times `gamma` at each milestone; `constant`: no change."""
    warmup_steps: int = 0
    """Raise the rate linearly over this many first steps."""
    milestones: tuple[int, ...] = ()
    """With the schedule `step`: the optimizer steps at which the learning rate is multiplied by `gamma`."""
    gamma: float = 0.1
    """With the schedule `step`: the factor by which the learning rate is multiplied at each milestone."""
    min_factor: float = 0.0
    """With the schedule `cosine`: the learning rate of the last step, as a fraction of `train.lr`."""


@dataclass(frozen=True, kw_only=True)
class DataSpec(CheckedSpec, section="data", above_zero=("prefetch_factor",), not_negative=("num_workers",)):
    """How samples reach the model."""

    num_workers: int = 0
    """Loader processes for each worker; 0: the worker loads the samples itself."""
    prefetch_factor: int = 2
    """Micro batches that each loader process prepares ahead."""
    drop_last: bool = False
    """Skip the samples at an epoch's end that do not fill a global batch."""


@dataclass(frozen=True, kw_only=True)
class EvalSpec(CheckedSpec, section="eval", above_zero=("every_epochs", "batch_size")):
    """When to evaluate the held-out samples."""

    every_epochs: int = 1
    """Evaluate after every so many epochs, and at the end."""
    batch_size: int = 256
    """Samples in one forward pass of a worker's evaluation."""


@dataclass(frozen=True, kw_only=True)
class LogSpec(CheckedSpec, section="log", above_zero=("every_steps",)):
    """What to log while training."""

    every_steps: int = 20
    """Write loss and learning rate to `metrics.jsonl` after every so many steps."""
    recorders: tuple[RecorderName, ...] = ()
    """What else gets the metrics: `tensorboard`, `wandb`, `mlflow` (needs `pip install ddp_hpc[wandb]`, and so on)."""
    grad_norm: bool = False
    """Write the norm of the gradients to the metrics; with `train.grad_clip_norm` it is there anyway."""

    def require_recorders(self) -> None:
        """Check that this Python has what the recorders need; nothing is imported."""
        for name in self.recorders:
            if find_spec(name) is None:
                raise ConfigError(
                    f"`log.recorders` asks for {name!r}, but the Python package {name!r} is not installed where the run would "
                    f"write to it. Install it with `pip install 'ddp_hpc[{name}]'`, or leave {name!r} out."
                )


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec(
    CheckedSpec,
    section="checkpoint",
    above_zero=("every_steps", "keep_last", "min_interval_s", "max_interval_s", "max_failing_s"),
    not_negative=("keep_best",),
):
    """When to commit checkpoints, and how many to keep."""

    every_steps: int | Literal["auto"] | None = 500
    """Write a checkpoint after every so many steps, and always at the end and when the run is asked to stop. `auto`: as often as
    costs the least time, by what is measured in this run: how long training waits for a save, and how often it fails without warning. Unset: only at the end and at a stop."""
    min_interval_s: int = 60
    """With `every_steps=auto`: save at most once in so many seconds, to spare the file system."""
    max_interval_s: int = 3600
    """With `every_steps=auto`: save at least once in so many seconds of training, however seldom the run fails."""
    max_failing_s: int | None = 3600
    """End the run when all saves of so many seconds have failed, as further training would not be saved either. One more save is tried
    first. Unset: never end it for this."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: int = 0
    """Number of best checkpoints, by `best_metric`, to keep in addition."""
    best_metric: str = "loss"
    """The evaluation metric that decides which checkpoint is best."""
    best_is: Literal["lowest", "highest"] | None = None
    """Whether the lowest or the highest value is best. Unset: the lowest `loss`; for other metrics it must be set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.every_steps != "auto" or self.min_interval_s <= self.max_interval_s,
            f"`checkpoint.min_interval_s` is {self.min_interval_s}, but `checkpoint.max_interval_s` is {self.max_interval_s}: the "
            "shortest interval must not be longer than the longest. Change one of them.",
        )
        require(
            self.keep_best == 0 or self.best_metric == "loss" or self.best_is is not None,
            f"`checkpoint.best_metric` is {self.best_metric!r}, but `checkpoint.best_is` is not set. Set `checkpoint.best_is` to `highest` or `lowest`.",
        )


@dataclass(frozen=True, kw_only=True)
class IntegritySpec(CheckedSpec, section="integrity", above_zero=("every_steps",)):
    """Whether all ranks still have the same weights, to the bit."""

    every_steps: int | None = 100
    """Compare weights, moving average and optimizer state of all ranks at the multiples of this number of steps, where an
    attempt begins, and before each save. Unset: never."""


@dataclass(frozen=True, kw_only=True)
class ProfileSpec(CheckedSpec, section="profile"):
    """A record of some steps, operator by operator."""

    kind: Literal["off", "torch"] = "off"
    """`torch`: record with PyTorch's profiler; each of the ranks writes a trace and a table of operators into `profile/`
    (docs/slow.md)."""
    steps: tuple[int, int] = (11, 15)
    """The first and the last step to record, counted from 1. Steps that lie before a resume are not repeated for it."""
    ranks: tuple[int, ...] = (0,)
    """The ranks that record."""

    def __post_init__(self) -> None:
        super().__post_init__()
        first, last = self.steps
        require(
            1 <= first <= last,
            f"`profile.steps` is {list(self.steps)}, but it must be the first and the last step to record, from 1 on: `[11, 15]`.",
        )
        require(
            bool(self.ranks) and min(self.ranks) >= 0,
            f"`profile.ranks` is {list(self.ranks)}, but it must name one rank or more, from 0 on.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainingSpec(CheckedSpec):
    """What the workers of a training read."""

    seed: int = 0
    """Seed of all random numbers."""
    recipe: RecipeSpec = field(default_factory=RecipeSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    lr_schedule: LrScheduleSpec = field(default_factory=LrScheduleSpec)
    data: DataSpec = field(default_factory=DataSpec)
    eval: EvalSpec = field(default_factory=EvalSpec)
    log: LogSpec = field(default_factory=LogSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    integrity: IntegritySpec = field(default_factory=IntegritySpec)
    profile: ProfileSpec = field(default_factory=ProfileSpec)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.seed < 2**63, f"`seed` is {self.seed!r}, but it must be between 0 and 2**63 - 1.")
