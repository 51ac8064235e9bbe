"""What the user asks for, as frozen dataclasses that check their values when they are made.

Every field is a key of the configuration (`train.lr` is `RunSpec.train.lr`); the text below a field is what
`ddp-hpc config` prints about it. Values that follow from others are properties.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from ddp_hpc.errors import ConfigError
from ddp_hpc.field_types import as_field, type_in_words
from ddp_hpc.run_dir import DEFAULT_RUNS_DIR

_CPU_WORKER_GB = 2
_FLAG_PATTERN = re.compile(r"[a-z][a-z0-9_-]*", re.IGNORECASE)
_MOST_SIGNAL_LEAD_S = 65535
"""The maximum of sbatch's `--signal`."""
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OUR_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"})
OnNonfinite = Literal["stop", "skip", "ignore"]
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(section: str, **values: float | None) -> None:
    for key, value in values.items():
        _require(
            value is None or value > 0,
            f"`{section}.{key}` is {value!r}, but it must be above zero.",
        )


def _require_one_line(section: str, **values: object) -> None:
    for key, value in values.items():
        texts = map(str, value if isinstance(value, tuple) else [value])
        _require(
            not any("\n" in text or "\0" in text for text in texts),
            f"`{section}.{key}` is {value!r}, but it must be one line: a line break in it would start "
            "a new line in the job script.",
        )


def _check_variable(name: str, value: object) -> None:
    """Refuse a variable that no process can have, or that ddp_hpc or Slurm sets."""
    _require(
        _VARIABLE_PATTERN.fullmatch(name) is not None,
        f"`env` has {name!r}, but a variable's name may have only letters, digits and `_`.",
    )
    _require(
        name not in _OUR_VARIABLES and not name.startswith("SLURM_"),
        f"`env.{name}` is set, but ddp-hpc or Slurm sets {name} for each worker. Remove it.",
    )
    _require(
        value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool)),
        f"`env.{name}` is {value!r}, but a variable holds text. Put the value in quotes.",
    )
    _require(
        "\0" not in str(value), f"`env.{name}` is {value!r}, but a variable cannot hold a NUL character. Remove it."
    )


class _Checked:
    """Base of all sections: checks each field against its annotation, for values from files and from Python."""

    def __post_init__(self) -> None:
        for name, annotation in _annotations(type(self)).items():  # type: ignore[arg-type]  # a class has a hash
            value = getattr(self, name)
            try:
                plain = as_field(value, annotation)
            except TypeError as error:
                raise ConfigError(
                    f"`{_key_of(type(self), name)}` is {value!r}, but it must be {type_in_words(annotation)}."
                ) from error
            if plain is not value:
                object.__setattr__(self, name, plain)  # the class is frozen, also for this method


@cache
def _annotations(section: type) -> Mapping[str, Any]:
    return get_type_hints(section)


def _key_of(section: type, name: str) -> str:
    """Return the key of a field: `train.lr` for `lr` of `TrainSpec`."""
    sections = {annotation: key for key, annotation in _annotations(RunSpec).items()}
    return f"{sections[section]}.{name}" if section in sections else name


@dataclass(frozen=True, kw_only=True)
class RecipeSpec(_Checked):
    """What to train."""

    target: str = "image_classification"
    """A function that returns a `Recipe` (`my_module:build`), or the name of a built-in recipe (`image_classification`)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for that function (`recipe.args.width=32`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, function = self.target.partition(":")
        _require(
            all(part.isidentifier() for part in module.split(".")) and (not function or function.isidentifier()),
            f"`recipe.target` is {self.target!r}, but it must be `module:function` "
            "or the name of a built-in recipe: `image_classification`.",
        )


@dataclass(frozen=True, kw_only=True)
class TrainSpec(_Checked):
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
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Precision of float32 matrix products, as in `torch.set_float32_matmul_precision`. `highest` turns TF32 off, also for
    convolutions; the others turn it on."""
    grad_clip_norm: float | None = None
    """Clip the total norm of the gradients that the optimizer uses to this value."""
    on_nonfinite: OnNonfinite = "stop"
    """What to do when the loss is not finite: `stop` ends the run as failed after 5 such steps in a row; `skip` skips
    updates whose gradients are not finite (this waits for the GPU at each step), and ends the run as failed after 50 in a
    row; `ignore` continues."""
    init_from: str | None = None
    """Load these weights before step 0: a `.safetensors` or `.pt` file, the name or directory of another run, or the directory
    of a checkpoint."""
    init_strict: bool = True
    """Refuse `init_from` if a weight is missing, unknown or of another shape. If false, only the weights that fit are loaded."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, and evaluate with it."""
    sync_batch_norm: bool = False
    """Compute batch-norm statistics over all workers (GPUs only)."""
    find_unused_parameters: bool = False
    """Allow parameters that get no gradient in some backward passes (slower)."""
    compile: bool = False
    """Compile the model with `torch.compile`."""
    channels_last: bool = False
    """Keep 4-D weights and inputs in channels-last memory format, which is faster for convolutions on GPUs."""
    deterministic: bool = False
    """Use deterministic algorithms only; on GPUs, a resumed run needs this to give exactly the same bits."""
    record_samples: bool = False
    """Write the sample ids of every step to `samples/`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(
            "train",
            epochs=self.epochs,
            max_steps=self.max_steps,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            lr=self.lr,
            grad_clip_norm=self.grad_clip_norm,
        )
        _require(
            self.ema_decay is None or 0 < self.ema_decay < 1,
            f"`train.ema_decay` is {self.ema_decay!r}, but it must be between 0 and 1.",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(_Checked):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.weight_decay >= 0,
            f"`optimizer.weight_decay` is {self.weight_decay!r}, but it must not be negative.",
        )


@dataclass(frozen=True, kw_only=True)
class LrScheduleSpec(_Checked):
    """The learning rate over the steps, as a factor of `train.lr`."""

    name: Literal["cosine", "step", "constant"] = "cosine"
    """`cosine`: down to `min_factor` at the last step; `step`: times `gamma` at each milestone; `constant`: no change."""
    warmup_steps: int = 0
    """Raise the rate linearly over this many first steps."""
    milestones: tuple[int, ...] = ()
    """Steps at which `step` lowers the rate."""
    gamma: float = 0.1
    """Factor by which `step` multiplies the rate."""
    min_factor: float = 0.0
    """Where `cosine` ends, as a factor of `train.lr`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.warmup_steps >= 0,
            f"`lr_schedule.warmup_steps` is {self.warmup_steps!r}, but it must not be negative.",
        )


@dataclass(frozen=True, kw_only=True)
class DataSpec(_Checked):
    """How samples reach the model."""

    num_workers: int = 0
    """Loader processes for each worker; 0: the worker loads the samples itself."""
    prefetch_factor: int = 2
    """Micro batches that each loader process prepares ahead."""
    drop_last: bool = False
    """Skip the samples at an epoch's end that do not fill a global batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.num_workers >= 0,
            f"`data.num_workers` is {self.num_workers!r}, but it must not be negative.",
        )
        _require_positive("data", prefetch_factor=self.prefetch_factor)


@dataclass(frozen=True, kw_only=True)
class EvalSpec(_Checked):
    """When to evaluate the held-out samples."""

    every_epochs: int = 1
    """Evaluate after every so many epochs, and at the end."""
    batch_size: int = 256
    """Samples in one forward pass of a worker's evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("eval", every_epochs=self.every_epochs, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class LogSpec(_Checked):
    """What to log while training."""

    every_steps: int = 20
    """Write loss and learning rate to `metrics.jsonl` after every so many steps."""
    tensorboard: bool = False
    """Write the same to `tensorboard/` (needs `pip install ddp_hpc[tensorboard]`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("log", every_steps=self.every_steps)


@dataclass(frozen=True, kw_only=True)
class ResourcesSpec(_Checked):
    """The machines that the run asks for."""

    nodes: int = 1
    """Number of machines."""
    workers_per_node: int | None = None
    """Training processes on each node. Unset: one for each GPU, or one without GPUs."""
    gpus_per_node: int = 0
    """GPUs of each node; 0 trains on CPUs."""
    gpu_type: str | None = None
    """Type of GPU, by the cluster's name for it (`a100`). Unset: any."""
    cpus_per_worker: int | None = None
    """CPUs of each worker. Unset: an equal share of the machine's CPUs; on Slurm, one, and one more for each loader process."""
    mem_gb: int | None = None
    """Memory of each node, in GiB. Unset: the cluster's default; without GPUs, 2 for each worker, as the default is often
    too small."""
    time_limit_min: int | None = None
    """Time limit of a job, in minutes. Unset: the cluster's default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(
            "resources",
            nodes=self.nodes,
            workers_per_node=self.workers_per_node,
            cpus_per_worker=self.cpus_per_worker,
            mem_gb=self.mem_gb,
            time_limit_min=self.time_limit_min,
        )
        _require_one_line("resources", gpu_type=self.gpu_type)
        _require(
            self.gpus_per_node >= 0,
            f"`resources.gpus_per_node` is {self.gpus_per_node!r}, but it must not be negative.",
        )
        _require(
            self.gpu_type is None or self.gpus_per_node > 0,
            f"`resources.gpu_type` is {self.gpu_type!r}, but `resources.gpus_per_node` is 0, so no GPU is asked for. "
            "Set `resources.gpus_per_node`, or `resources.gpu_type=null`.",
        )
        _require(
            self.gpus_per_node == 0 or self.local_world_size <= self.gpus_per_node,
            f"`resources.workers_per_node` is {self.workers_per_node}, but `resources.gpus_per_node` is "
            f"{self.gpus_per_node}. Ask for one GPU for each worker, or set `resources.gpus_per_node=0` to train on CPUs.",
        )

    @property
    def local_world_size(self) -> int:
        """Workers on each node."""
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Workers of the whole run."""
        return self.nodes * self.local_world_size


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec(_Checked):
    """When to commit checkpoints, and how many to keep."""

    every_steps: int | None = 500
    """Commit after every so many steps, and always at the end and at a stop signal. Unset: only at the end and at a stop signal."""
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
        _require_positive("checkpoint", every_steps=self.every_steps, keep_last=self.keep_last)
        _require(
            self.keep_best >= 0,
            f"`checkpoint.keep_best` is {self.keep_best!r}, but it must not be negative.",
        )
        _require(
            self.keep_best == 0 or self.best_metric == "loss" or self.best_is is not None,
            f"`checkpoint.best_metric` is {self.best_metric!r}, but `checkpoint.best_is` is not set. "
            "Set `checkpoint.best_is` to `highest` or `lowest`.",
        )


@dataclass(frozen=True, kw_only=True)
class SlurmSpec(_Checked):
    """Slurm's options, by Slurm's names; used for runs on Slurm."""

    partition: str | None = None
    """`--partition`."""
    account: str | None = None
    """`--account`."""
    qos: str | None = None
    """`--qos`."""
    constraint: str | None = None
    """`--constraint`."""
    exclude: str | None = None
    """`--exclude`."""
    nodelist: str | None = None
    """`--nodelist`."""
    reservation: str | None = None
    """`--reservation`."""
    dependency: str | None = None
    """`--dependency`."""
    mail_type: str | None = None
    """`--mail-type`."""
    mail_user: str | None = None
    """`--mail-user`."""
    comment: str | None = None
    """`--comment`."""
    requeue: bool = True
    """`--requeue`: let Slurm put the job back into the queue after a preemption or a node failure."""
    signal_lead_s: int = 120
    """`--signal`: how many seconds before the time limit Slurm asks the run to commit a checkpoint and exit."""
    signal_to: Literal["steps", "batch"] = "steps"
    """Who gets that signal: the job's steps, or the batch shell alone (`--signal=B:...`), which some sites require."""
    hasten: Literal["auto", "never"] = "auto"
    """Whether `submit --wait` and `--follow` start a requeued job before Slurm's delay is over: `auto`, yes; `never`, only
    `ddp-hpc requeue --now` does."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Any other flag of sbatch (`slurm.extra.switches=1`); `true` adds a flag without a value, `false` leaves it out."""
    modules: tuple[str, ...] = ()
    """Environment modules that the job script loads first, after `module purge` (`cuda/12.4`)."""
    setup: tuple[str, ...] = ()
    """Lines of shell that the job script runs after loading modules (`ulimit -l unlimited`)."""
    srun_args: tuple[str, ...] = ()
    """More arguments for srun, one for each item (`--cpu-bind=none`)."""
    template: str | None = None
    """Path of your own template for the job script. Unset: `sbatch_templates/ddp.sbatch.j2`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_line("slurm", **{key: value for key, value in vars(self).items() if key != "extra"})
        _require_one_line("slurm.extra", **{str(key): value for key, value in self.extra.items()})
        _require(
            0 < self.signal_lead_s <= _MOST_SIGNAL_LEAD_S,
            f"`slurm.signal_lead_s` is {self.signal_lead_s!r}, but it must be between 1 and {_MOST_SIGNAL_LEAD_S}.",
        )
        for flag in self.extra:
            _require(
                _FLAG_PATTERN.fullmatch(str(flag)) is not None,
                f"`slurm.extra` has {flag!r}, but a flag of sbatch has only letters, digits and `-`. "
                "Write it without the leading dashes (`switches`).",
            )
            _require(
                str(flag) not in {"clusters", "M"},
                f"`slurm.extra.{flag}` asks for another cluster, but ddp-hpc works only with the cluster of the login node. "
                "Remove it, and submit the run from a login node of that cluster.",
            )


@dataclass(frozen=True, kw_only=True)
class TorchrunSpec(_Checked):
    """torchrun's options; used with `launcher=torchrun`."""

    max_restarts: int = 0
    """`--max-restarts`: how often torchrun restarts the workers within the same job after one failed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.max_restarts >= 0,
            f"`torchrun.max_restarts` is {self.max_restarts!r}, but it must not be negative.",
        )


_LEAST_BUILD_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class RestartSpec(_Checked):
    """What to do on Slurm when an attempt ends before the run is finished. On one machine, `submit` only reports it."""

    max_no_progress: int = 3
    """End the run after this many failures in a row without a new checkpoint. While checkpoints advance, failures are unlimited."""
    in_place: bool = True
    """Restart crashed workers on the job's nodes. If false, the job goes back into the queue."""
    by: Literal["requeue", "successor"] = "requeue"
    """How a job goes back into the queue: `requeue` keeps its job id (`scontrol requeue`); `successor` submits a new job,
    which can start sooner, as Slurm delays requeued jobs (usually 2 minutes), but loses the old job's age priority."""
    hang_timeout_s: int = 900
    """Treat the workers as hung after this many seconds without progress. Set it longer than any step, batch or save takes."""
    exclude_after: int = 2
    """Failures of one node after which the run's jobs exclude it: hangs, workers killed by a signal, lost nodes; not exceptions."""
    forget_h: int = 24
    """How many hours a node's failures count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(
            "restart",
            max_no_progress=self.max_no_progress,
            hang_timeout_s=self.hang_timeout_s,
            exclude_after=self.exclude_after,
            forget_h=self.forget_h,
        )

    @property
    def build_timeout_s(self) -> int:
        """How long the recipe may take to build on the slowest rank: listing a large data set is not a hang."""
        return max(self.hang_timeout_s, _LEAST_BUILD_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class SnapshotSpec(_Checked):
    """The copy of your code that a job runs."""

    enabled: bool = True
    """Copy the code at submit, so that later edits do not change the job. If false, the job imports the code from its directory."""
    max_mb: int = 100
    """Refuse to copy more code than this, in MB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("snapshot", max_mb=self.max_mb)


@dataclass(frozen=True, kw_only=True)
class ContainerSpec(_Checked):
    """The container image that the workers run in."""

    image: str | None = None
    """Image file or directory; for pyxis also an image address; for Docker an image name. Unset: no container."""
    runtime: Literal["auto", "apptainer", "singularity", "pyxis", "docker"] = "auto"
    """The container runtime. `auto`: Apptainer, or else Singularity, from the job's PATH. Docker works without Slurm only."""
    python: str = "python3"
    """The image's Python, with PyTorch and the packages that ddp_hpc needs."""
    binds: tuple[str, ...] = ()
    """More paths to mount in the container, `SOURCE[:TARGET[:ro]]`."""
    gpus: Literal["auto", "nvidia", "rocm", "none"] = "auto"
    """Whose GPU driver the container gets (`--nv`, `--rocm`). `auto`: NVIDIA's, if the run asks for GPUs."""
    options: tuple[str, ...] = ()
    """More options for the runtime, one for each item (`--fakeroot`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_line("container", **vars(self))


@dataclass(frozen=True, kw_only=True)
class StageSpec(_Checked):
    """What to copy to each node's local disk before the workers start, on Slurm."""

    dir: str | None = None
    """A directory on each node's local disk (`/local`, `$TMPDIR`) for the image file or the archive. Unset: nothing is copied."""
    archive: str | None = None
    """A Python environment packed with conda-pack or venv-pack (`env.tar.gz`); its Python runs the workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_line("stage", **vars(self))
        _require(
            self.archive is None or self.dir is not None,
            "`stage.archive` is set, but `stage.dir` is not. Set it to a directory on each node's local disk.",
        )


@dataclass(frozen=True, kw_only=True)
class NetworkSpec(_Checked):
    """The network that the ranks meet on."""

    interfaces: tuple[str, ...] = ()
    """Interfaces to prefer on rank zero's node, the best first (`hsn*`). Unset: the fastest network that all nodes share."""


@dataclass(frozen=True, kw_only=True)
class RunSpec(_Checked):
    """One run: all keys of its configuration."""

    name: str
    """Name of the run and of its directory. Default: the configuration file's name without its ending."""
    runs_dir: str = DEFAULT_RUNS_DIR
    """The directory of all runs; on a cluster, all nodes must share it."""
    seed: int = 0
    """Seed of all random numbers."""
    launcher: Literal["agent", "srun", "torchrun"] = "agent"
    """What starts the workers: `agent`, one process on each node that forks them; `srun`, one Slurm task for each worker; or
    `torchrun` on each node. Without Slurm it is always `agent`."""
    recipe: RecipeSpec = field(default_factory=RecipeSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    lr_schedule: LrScheduleSpec = field(default_factory=LrScheduleSpec)
    data: DataSpec = field(default_factory=DataSpec)
    eval: EvalSpec = field(default_factory=EvalSpec)
    log: LogSpec = field(default_factory=LogSpec)
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    torchrun: TorchrunSpec = field(default_factory=TorchrunSpec)
    restart: RestartSpec = field(default_factory=RestartSpec)
    snapshot: SnapshotSpec = field(default_factory=SnapshotSpec)
    container: ContainerSpec = field(default_factory=ContainerSpec)
    stage: StageSpec = field(default_factory=StageSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    env: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables for the run's processes; they win over those of the shell that submits (`env.NCCL_DEBUG=INFO`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            NAME_PATTERN.fullmatch(self.name) is not None,
            f"`name` is {self.name!r}, but it becomes a directory's name: use at most 128 letters, digits, "
            "`.`, `_` and `-`, and begin with a letter or a digit.",
        )
        _require(
            0 <= self.seed < 2**63,
            f"`seed` is {self.seed!r}, but it must be between 0 and 2**63 - 1.",
        )
        self._check_batch()
        _require(
            self.stage.archive is None or self.container.image is None,
            "`stage.archive` and `container.image` are both set, but workers can use only one of them. Unset the other.",
        )
        for variable, value in self.env.items():
            _check_variable(variable, value)
        on_cpus = self.resources.gpus_per_node == 0 and self.resources.world_size > 1
        _require(
            not (self.train.sync_batch_norm and on_cpus),
            "`train.sync_batch_norm` is true, but PyTorch synchronises batch norm on GPUs only and "
            "`resources.gpus_per_node` is 0. Set `train.sync_batch_norm=false`, or ask for GPUs.",
        )

    def _check_batch(self) -> None:
        """Refuse a global batch that cannot be split evenly among the workers."""
        share = self.resources.world_size * (self.train.micro_batch_size or 1)
        asked = self.train.global_batch_size
        if asked % share == 0:
            return
        below, above = asked // share * share, (asked // share + 1) * share
        micro = f" x `train.micro_batch_size` {self.train.micro_batch_size}" if self.train.micro_batch_size else ""
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"`train.global_batch_size` is {asked}, but {self.resources.world_size} workers "
            f"(`resources.nodes` {self.resources.nodes} x `resources.workers_per_node` "
            f"{self.resources.local_world_size}){micro} "
            f"need a multiple of {share}. Set `train.global_batch_size` to {nearest}."
        )

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that the run sets; a variable that is null stays as it is."""
        return {name: str(value) for name, value in self.env.items() if value is not None}

    @property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.runs_dir).expanduser().absolute() / self.name

    @property
    def mem_gb(self) -> int | None:
        """Memory of each node to ask Slurm for; None for the cluster's default, which often depends on the GPUs."""
        resources = self.resources
        if resources.mem_gb is None and resources.gpus_per_node == 0:
            return _CPU_WORKER_GB * resources.local_world_size
        return resources.mem_gb

    @property
    def cpus_per_task(self) -> int:
        """CPUs of each worker to ask Slurm for: what the user set, or one, and one more for each loader process."""
        return self.resources.cpus_per_worker or 1 + self.data.num_workers

    @property
    def micro_batch_size(self) -> int:
        """Samples in one forward and backward pass of a worker."""
        return self.train.micro_batch_size or self.train.global_batch_size // self.resources.world_size
