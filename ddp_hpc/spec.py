"""What the user asks for: frozen dataclasses that check themselves when made.

Every field is a key of the configuration (`train.lr` is `RunSpec.train.lr`); the text below a field is what
`ddp-hpc config` prints about it. Numbers that follow from others are properties.
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
"""What sbatch takes."""
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
            f"`{section}.{key}` is {value!r}, but it must be one line: a line break would become "
            "another line of the job script.",
        )


def _check_variable(name: str, value: object) -> None:
    """Refuse a variable that cannot be set, or that is not the user's to set."""
    _require(
        _VARIABLE_PATTERN.fullmatch(name) is not None,
        f"`env` has {name!r}, but a variable's name is made of letters, digits and `_`.",
    )
    _require(
        name not in _OUR_VARIABLES and not name.startswith("SLURM_"),
        f"`env.{name}` is set, but each worker gets a {name} of its own. Remove it.",
    )
    _require(
        value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool)),
        f"`env.{name}` is {value!r}, but a variable holds text. Put it in quotes.",
    )
    _require("\0" not in str(value), f"`env.{name}` is {value!r}, but a variable cannot hold a NUL.")


class _Checked:
    """Base of all sections: each field holds what its annotation says, whoever made it, a file or Python."""

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
                object.__setattr__(self, name, plain)  # frozen for others


@cache
def _annotations(section: type) -> Mapping[str, Any]:
    return get_type_hints(section)


def _key_of(section: type, name: str) -> str:
    """Return the key of a field: `train.lr` for `lr` of `TrainSpec`."""
    sections = {annotation: key for key, annotation in _annotations(RunSpec).items()}
    return f"{sections[section]}.{name}" if section in sections else name


@dataclass(frozen=True, kw_only=True)
class RecipeSpec(_Checked):
    """What is trained."""

    target: str = "image_classification"
    """`my_module:build`, a function that returns a `Recipe`; or a built-in one: `image_classification`."""
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
    """How long and with which numbers."""

    epochs: int = 10
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after so many optimizer steps, even amid an epoch."""
    global_batch_size: int = 64
    """Samples of one optimizer step, over all workers and micro batches; it stays when the world changes."""
    micro_batch_size: int | None = None
    """Samples a worker takes through the model at once; gradients are accumulated up to the global batch.
    Unset: the worker's whole share."""
    lr: float = 0.1
    """Peak learning rate."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Arithmetic of forward and backward (autocast); fp16 scales the loss. Weights stay in fp32."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Arithmetic of float32 matrix products, as for `torch.set_float32_matmul_precision`. TF32 is off with `highest`, in
    convolutions too, and on with the others."""
    grad_clip_norm: float | None = None
    """Clip the norm of all gradients that the optimizer uses together to this."""
    on_nonfinite: OnNonfinite = "stop"
    """When the loss is not finite: `stop` ends the run as failed after 5 such steps in a row; `skip` leaves out updates whose
    gradients are not finite, which waits for the GPU at each step, and ends the run after 50 in a row; `ignore` goes on."""
    init_from: str | None = None
    """Weights to begin with, at step 0 only: a `.safetensors` or `.pt` file, another run's name or directory, or a checkpoint's."""
    init_strict: bool = True
    """Refuse `init_from` where a weight is missing, unknown or of another shape; else only those that fit are taken."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, and evaluate with it."""
    sync_batch_norm: bool = False
    """Compute batch-norm statistics over all workers (GPUs only)."""
    find_unused_parameters: bool = False
    """Allow parameters that take no part in a backward (slower)."""
    compile: bool = False
    """Run the model through `torch.compile`."""
    channels_last: bool = False
    """Keep 4-D weights and inputs in channels-last order, faster for convolutions on GPUs."""
    deterministic: bool = False
    """Allow only deterministic algorithms; needed on GPUs for a resume that is exact to the bit."""
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
            f"`train.ema_decay` is {self.ema_decay!r}, but it must lie between 0 and 1.",
        )


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec(_Checked):
    """The optimizer, where the recipe brings none of its own."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    momentum: float = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """Nesterov's form of momentum."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-8
    """Term added to AdamW's denominator."""
    weight_decay: float = 5e-4
    """Decay of weights; biases and normalisation parameters (1-D or scalar) are never decayed."""

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
    """Cosine to `min_factor` at the last step; a drop by `gamma` at each milestone; or no change."""
    warmup_steps: int = 0
    """Rise linearly over the first so many steps."""
    milestones: tuple[int, ...] = ()
    """Steps at which `step` drops the rate."""
    gamma: float = 0.1
    """Factor of each drop of `step`."""
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
    """Loader processes a worker; 0 loads in the worker itself."""
    prefetch_factor: int = 2
    """Micro batches each loader process prepares ahead."""
    drop_last: bool = False
    """Leave out the samples at an epoch's end that do not fill a global batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.num_workers >= 0,
            f"`data.num_workers` is {self.num_workers!r}, but it must not be negative.",
        )
        _require_positive("data", prefetch_factor=self.prefetch_factor)


@dataclass(frozen=True, kw_only=True)
class EvalSpec(_Checked):
    """When the held-out samples are evaluated."""

    every_epochs: int = 1
    """Evaluate after so many epochs, and at the end."""
    batch_size: int = 256
    """Samples a worker evaluates at once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("eval", every_epochs=self.every_epochs, batch_size=self.batch_size)


@dataclass(frozen=True, kw_only=True)
class LogSpec(_Checked):
    """What is written down on the way."""

    every_steps: int = 20
    """Write loss and learning rate to `metrics.jsonl` after so many steps."""
    tensorboard: bool = False
    """Write the same to `tensorboard/` (needs `pip install ddp_hpc[tensorboard]`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("log", every_steps=self.every_steps)


@dataclass(frozen=True, kw_only=True)
class ResourcesSpec(_Checked):
    """What the run asks of machines."""

    nodes: int = 1
    """Machines."""
    workers_per_node: int | None = None
    """Training processes a node. Unset: one a GPU, or one."""
    gpus_per_node: int = 0
    """GPUs of each node; 0 trains on CPUs."""
    gpu_type: str | None = None
    """Type of GPU, as the cluster calls it (`a100`). Unset: any."""
    cpus_per_worker: int | None = None
    """CPUs of each worker. Unset: an equal share of the CPUs at hand; on Slurm, one and one a loader process."""
    mem_gb: int | None = None
    """Memory of each node, in GiB. Unset: the cluster's default; on CPUs, for which that is often too little, 2 a worker."""
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
            f"{self.gpus_per_node}. Ask for one GPU a worker, or for `resources.gpus_per_node=0`.",
        )

    @property
    def local_world_size(self) -> int:
        """Workers a node."""
        return self.workers_per_node or self.gpus_per_node or 1

    @property
    def world_size(self) -> int:
        """Workers of the run."""
        return self.nodes * self.local_world_size


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec(_Checked):
    """When the training state is committed, and how much of it is kept."""

    every_steps: int | None = 500
    """Commit after so many steps (and always at the end and after a stop signal); unset: only then."""
    keep_last: int = 2
    """Newest checkpoints to keep."""
    keep_best: int = 0
    """Best checkpoints, by `best_metric`, to keep besides."""
    best_metric: str = "loss"
    """The evaluation's number that says which is best."""
    best_is: Literal["lowest", "highest"] | None = None
    """Whether the lowest or the highest is best. Unset: the lowest `loss`; for any other number it must be given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("checkpoint", every_steps=self.every_steps, keep_last=self.keep_last)
        _require(
            self.keep_best >= 0,
            f"`checkpoint.keep_best` is {self.keep_best!r}, but it must not be negative.",
        )
        _require(
            self.keep_best == 0 or self.best_metric == "loss" or self.best_is is not None,
            f"`checkpoint.best_metric` is {self.best_metric!r}, but nothing says which of two is better. "
            "Set `checkpoint.best_is` to `highest` or `lowest`.",
        )


@dataclass(frozen=True, kw_only=True)
class SlurmSpec(_Checked):
    """Slurm's options, by Slurm's own names; used with `--cluster slurm`."""

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
    """`--requeue`: let Slurm put the job back into the queue when it takes its nodes away."""
    signal_lead_s: int = 120
    """`--signal`: how long before its time limit Slurm warns a run, which then commits a checkpoint and exits."""
    signal_to: Literal["steps", "batch"] = "steps"
    """Which processes Slurm signals: the job's steps, or the batch shell alone (`--signal=B:...`), as some sites want it."""
    hasten: Literal["auto", "never"] = "auto"
    """Whether `submit --wait` and `--follow` let a requeued job begin before the site's delay is over; `requeue --now` does."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Any other flag of sbatch (`slurm.extra.switches=1`); `true` is a flag without a value, `false` none."""
    modules: tuple[str, ...] = ()
    """Modules that the job script loads first, after `module purge` (`cuda/12.4`)."""
    setup: tuple[str, ...] = ()
    """Lines of shell that the job script runs next (`ulimit -l unlimited`)."""
    srun_args: tuple[str, ...] = ()
    """More arguments of srun, one an item (`--cpu-bind=none`)."""
    template: str | None = None
    """A template of your own for the job script. Unset: `sbatch_templates/ddp.sbatch.j2`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_line("slurm", **{key: value for key, value in vars(self).items() if key != "extra"})
        _require_one_line("slurm.extra", **{str(key): value for key, value in self.extra.items()})
        _require(
            0 < self.signal_lead_s <= _MOST_SIGNAL_LEAD_S,
            f"`slurm.signal_lead_s` is {self.signal_lead_s!r}, but it must lie between 1 and {_MOST_SIGNAL_LEAD_S}.",
        )
        for flag in self.extra:
            _require(
                _FLAG_PATTERN.fullmatch(str(flag)) is not None,
                f"`slurm.extra` has {flag!r}, but a flag of sbatch is made of letters, digits and `-`, "
                "without the dashes before it (`switches`).",
            )
            _require(
                str(flag) not in {"clusters", "M"},
                f"`slurm.extra.{flag}` asks for another cluster, but a run's job is looked for on the cluster of this login "
                "node alone. Submit it from a login node of that cluster.",
            )


@dataclass(frozen=True, kw_only=True)
class TorchrunSpec(_Checked):
    """torchrun's options; used with `launcher=torchrun`."""

    max_restarts: int = 0
    """`--max-restarts`: how often torchrun starts the workers again, in the same job, when one has failed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.max_restarts >= 0,
            f"`torchrun.max_restarts` is {self.max_restarts!r}, but it must not be negative.",
        )


_LEAST_BUILD_TIMEOUT_S = 1800


@dataclass(frozen=True, kw_only=True)
class RestartSpec(_Checked):
    """What is done on Slurm when an attempt ends before the run does; on this machine, you are told."""

    max_no_progress: int = 3
    """Give up after so many failures in a row without a new checkpoint; with new ones, there is no limit."""
    in_place: bool = True
    """Start crashed workers again on the nodes the job has; else the job goes back into the queue."""
    by: Literal["requeue", "successor"] = "requeue"
    """How a job goes back into the queue: under its number (`scontrol requeue`), or as a new job, which starts sooner
    where Slurm holds requeued ones back (2 minutes, usually) and loses the age the old one had in the queue."""
    hang_timeout_s: int = 900
    """Treat the workers as hung when none has made progress for so long: longer than any step, batch or save of yours."""
    exclude_after: int = 2
    """Failures of one node after which the run avoids it (hangs, deaths by signal, losses; not exceptions)."""
    forget_h: int = 24
    """How long failures of nodes are remembered, in hours."""

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
        """How long the recipe may take to be built on the slowest rank: listing a large data set is no hang."""
        return max(self.hang_timeout_s, _LEAST_BUILD_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class SnapshotSpec(_Checked):
    """The copy of your code that a queued job runs."""

    enabled: bool = True
    """Copy the code at submit, so that edits after it do not reach the job; else the job imports it where it lies."""
    max_mb: int = 100
    """Refuse to copy more than this, in MB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("snapshot", max_mb=self.max_mb)


@dataclass(frozen=True, kw_only=True)
class ContainerSpec(_Checked):
    """The image the workers run in; unset: none."""

    image: str | None = None
    """Image file or directory; with pyxis, an address it understands too; with Docker, a name."""
    runtime: Literal["auto", "apptainer", "singularity", "pyxis", "docker"] = "auto"
    """What runs the image; `auto` takes Apptainer, or else Singularity, from the job's PATH. Docker: on one machine only."""
    python: str = "python3"
    """The image's Python, which has PyTorch and what ddp_hpc needs."""
    binds: tuple[str, ...] = ()
    """More paths to see inside, `SOURCE[:TARGET[:ro]]`."""
    gpus: Literal["auto", "nvidia", "rocm", "none"] = "auto"
    """Whose driver is brought in (`--nv`, `--rocm`); `auto`: NVIDIA's, where GPUs are asked for."""
    options: tuple[str, ...] = ()
    """More options of the runtime, one an item (`--fakeroot`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_line("container", **vars(self))


@dataclass(frozen=True, kw_only=True)
class StageSpec(_Checked):
    """What is put on each node's own disk before the workers start, on Slurm."""

    dir: str | None = None
    """A directory of each node's own (`/local`, `$TMPDIR`), for the image, if it is a file, or the archive. Unset: nothing is staged."""
    archive: str | None = None
    """An environment packed by conda-pack or venv-pack (`env.tar.gz`): its Python runs the workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_one_line("stage", **vars(self))
        _require(
            self.archive is None or self.dir is not None,
            "`stage.archive` is set, but `stage.dir` is not: name a directory of each node's own.",
        )


@dataclass(frozen=True, kw_only=True)
class NetworkSpec(_Checked):
    """The network that the ranks meet on."""

    interfaces: tuple[str, ...] = ()
    """Names of interfaces to prefer on rank zero's node, the best first (`hsn*`). Unset: the fastest that all nodes share."""


@dataclass(frozen=True, kw_only=True)
class RunSpec(_Checked):
    """One training, from its name to its last key."""

    name: str
    """Name of the run and of its directory. Default: the configuration file's stem."""
    runs_dir: str = DEFAULT_RUNS_DIR
    """Where runs live; on a cluster, a directory that all nodes share."""
    seed: int = 0
    """Everything random follows from it."""
    launcher: Literal["agent", "srun", "torchrun"] = "agent"
    """What starts the workers: one agent a node that forks them; or, on Slurm, one task a GPU; or torchrun."""
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
    """Variables that the run sets in its job, whatever they were at submit (`env.NCCL_DEBUG=INFO`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            NAME_PATTERN.fullmatch(self.name) is not None,
            f"`name` is {self.name!r}, but it names a directory: use letters, digits, `.`, `_` and `-`, "
            "beginning with a letter or a digit, 128 at most.",
        )
        _require(
            0 <= self.seed < 2**63,
            f"`seed` is {self.seed!r}, but it must lie between 0 and 2**63 - 1.",
        )
        self._check_batch()
        _require(
            self.stage.archive is None or self.container.image is None,
            "`stage.archive` and `container.image` are set, but workers run in one of them. Unset the other.",
        )
        for variable, value in self.env.items():
            _check_variable(variable, value)
        on_cpus = self.resources.gpus_per_node == 0 and self.resources.world_size > 1
        _require(
            not (self.train.sync_batch_norm and on_cpus),
            "`train.sync_batch_norm` is true, but PyTorch synchronises batch norm on GPUs only and "
            "`resources.gpus_per_node` is 0. Leave it out, or ask for GPUs.",
        )

    def _check_batch(self) -> None:
        """Refuse a global batch that the world cannot deal out evenly."""
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
            f"take {share} at a time. Choose a multiple of {share}: {nearest}."
        )

    @property
    def environ(self) -> dict[str, str]:
        """The variables that the run sets; one that is null is left as it was."""
        return {name: str(value) for name, value in self.env.items() if value is not None}

    @property
    def path(self) -> Path:
        """The run's directory."""
        return Path(self.runs_dir).expanduser().absolute() / self.name

    @property
    def mem_gb(self) -> int | None:
        """Memory to ask Slurm for, a node; None for the cluster's default, which goes by the GPU where there are some."""
        resources = self.resources
        if resources.mem_gb is None and resources.gpus_per_node == 0:
            return _CPU_WORKER_GB * resources.local_world_size
        return resources.mem_gb

    @property
    def cpus_per_task(self) -> int:
        """CPUs to ask Slurm for, a worker: what was asked, or one and one a loader process."""
        return self.resources.cpus_per_worker or 1 + self.data.num_workers

    @property
    def micro_batch_size(self) -> int:
        """Samples a worker takes through the model at once."""
        return self.train.micro_batch_size or self.train.global_batch_size // self.resources.world_size
