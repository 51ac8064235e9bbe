"""How a run is started and kept alive: the keys that launching reads, whatever the workers do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ddp_hpc.run.run_dir.paths import DEFAULT_RUNS_DIR
from ddp_hpc.run.spec.checked import CheckedSpec, require, require_command, require_one_line
from ddp_hpc.run.world import World

_CPU_WORKER_GB = 2
_HINT_BY_REFUSED_FLAG = {
    "array": "; for many runs, use `ddp-hpc submit --sweep`",
    "a": "; for many runs, use `ddp-hpc submit --sweep`",
    "wrap": "; for a command of your own, use `ddp-hpc submit -- COMMAND`",
    **dict.fromkeys(
        ("hetjob", "het-group", "test-only", "parsable", "wait", "W", "help", "h", "usage", "version", "V"), ""
    ),
}
"""Flags of sbatch that no run can have -> what to use instead."""
_FLAG_PATTERN = re.compile(r"[a-z][a-z0-9_-]*", re.IGNORECASE)
_LEAST_BUILD_TIMEOUT_S = 1800
_MOST_SIGNAL_LEAD_S = 65535
"""The maximum of sbatch's `--signal`."""
_VARIABLE_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OUR_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"})
RUN_NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class ResourcesSpec(
    CheckedSpec,
    section="resources",
    above_zero=("nodes", "workers_per_node", "cpus_per_worker", "mem_gb", "time_limit_min"),
    not_negative=("gpus_per_node",),
):
    """The machines that the run asks for."""

    nodes: int = 1
    """Number of nodes (machines)."""
    workers_per_node: int | None = None
    """Training processes on each node. Unset: one for each GPU, or one without GPUs."""
    gpus_per_node: int | None = None
    """GPUs of each node; 0 trains on CPUs. Unset: on one machine, NVIDIA's GPUs that CUDA_VISIBLE_DEVICES shows and that have no
    other work, and for a script one worker that sees them; on Slurm, none."""
    gpu_type: str | None = None
    """Type of GPU, by the cluster's name for it (`a100`). Unset: any."""
    cpus_per_worker: int | None = None
    """CPUs of each worker. Unset: an equal share of the machine's CPUs; on Slurm, one, and one more for each loader process, or
    with GPUs the node's CPUs divided by its GPUs where that is more."""
    mem_gb: int | None = None
    """Memory of each node, in GiB. Unset: the cluster's default; without GPUs, 2 for each worker, as the default is often
    too small."""
    time_limit_min: int | None = None
    """Time limit of a job, in minutes. Unset: the cluster's default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_line("resources", gpu_type=self.gpu_type)
        require(
            self.gpu_type is None or self.num_gpus > 0,
            f"`resources.gpu_type` is {self.gpu_type!r}, but `resources.gpus_per_node` is {self.num_gpus}, so no GPU is asked for. "
            "Set `resources.gpus_per_node`, or `resources.gpu_type=null`.",
        )
        require(
            self.num_gpus == 0 or self.local_world_size <= self.num_gpus,
            f"`resources.workers_per_node` is {self.workers_per_node}, but `resources.gpus_per_node` is "
            f"{self.gpus_per_node}. Ask for one GPU for each worker, or set `resources.gpus_per_node=0` to train on CPUs.",
        )

    @property
    def num_gpus(self) -> int:
        """GPUs of each node to ask for; 0 also where the key is unset."""
        return self.gpus_per_node or 0

    @property
    def local_world_size(self) -> int:
        """Workers on each node."""
        return self.workers_per_node or self.num_gpus or 1

    @property
    def world_size(self) -> int:
        """Workers of the whole run."""
        return self.world.world_size

    @property
    def world(self) -> World:
        """The world that is asked for; a job says which one it was given."""
        return World(num_nodes=self.nodes, workers_per_node=self.local_world_size)


@dataclass(frozen=True, kw_only=True)
class SlurmSpec(CheckedSpec, section="slurm"):
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
    dependency: str | None = None
    """`--dependency`."""
    requeue: bool = True
    """`--requeue`: let Slurm put the job back into the queue after a preemption or a node failure."""
    signal_lead_s: int = 120
    """`--signal`: how many seconds before the time limit Slurm asks the run to commit a checkpoint and exit."""
    signal_to: Literal["steps", "batch"] = "steps"
    """Who gets the signal of `slurm.signal_lead_s`: the job's steps, or the batch shell alone (`--signal=B:...`), which some sites require."""
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """How the job asks for `resources.gpus_per_node`: by `--gpus-per-node`, by `--gres=gpu`, or `none`, on sites that give whole nodes
    and do not count GPUs."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Any other flag of sbatch (`slurm.extra.switches=1`); `true` adds a flag without a value, `false` leaves it out."""
    modules: tuple[str, ...] = ()
    """Environment modules that the job script loads first, after `module purge` (`cuda/12.4`)."""
    setup: tuple[str, ...] = ()
    """Lines of shell that the job script runs after loading modules (`ulimit -l unlimited`); a command that fails ends the job."""
    srun_args: tuple[str, ...] = ()
    """More arguments for srun, one for each item (`--cpu-bind=none`)."""
    template: str | None = None
    """Path of your own template for the job script. Unset: `sbatch_templates/ddp.sbatch.j2`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_line("slurm", **{key: value for key, value in vars(self).items() if key != "extra"})
        require_one_line("slurm.extra", **{str(key): value for key, value in self.extra.items()})
        require(
            0 < self.signal_lead_s <= _MOST_SIGNAL_LEAD_S,
            f"`slurm.signal_lead_s` is {self.signal_lead_s!r}, but it must be between 1 and {_MOST_SIGNAL_LEAD_S}.",
        )
        for flag in self.extra:
            require(
                _FLAG_PATTERN.fullmatch(str(flag)) is not None,
                f"`slurm.extra` has {flag!r}, but a flag of sbatch has only letters, digits and `-`. Write it without the leading dashes (`switches`).",
            )
            require(
                str(flag) not in {"clusters", "M"},
                f"`slurm.extra.{flag}` asks for another cluster, but ddp-hpc works only with the cluster of the login node. "
                "Remove it, and submit the run from a login node of that cluster.",
            )
            require(
                str(flag).replace("_", "-") not in _HINT_BY_REFUSED_FLAG,
                f"`slurm.extra.{flag}` would make something else of the job than one run. Remove it{_HINT_BY_REFUSED_FLAG.get(str(flag), '')}.",
            )


@dataclass(frozen=True, kw_only=True)
class TorchrunSpec(CheckedSpec, section="torchrun", not_negative=("max_restarts",)):
    """torchrun's options; used with `launcher=torchrun`."""

    max_restarts: int = 0
    """`--max-restarts`: how often torchrun restarts the workers within the same job after one failed."""


@dataclass(frozen=True, kw_only=True)
class RestartSpec(
    CheckedSpec, section="restart", above_zero=("max_no_progress", "hang_timeout_s", "exclude_after", "forget_h")
):
    """What to do on Slurm when an attempt ends before the run is finished. On one machine, `submit` only reports it."""

    max_no_progress: int = 3
    """End the run after this many failures in a row without a new checkpoint. While checkpoints advance, failures are unlimited."""
    in_place: bool = True
    """Restart crashed workers on the job's nodes. If false, the job goes back into the queue; on one machine, the run ends."""
    by: Literal["requeue", "successor"] = "requeue"
    """How a job goes back into the queue: `requeue` keeps its job id (`scontrol requeue`); `successor` submits a new job,
    which can start sooner, as Slurm delays requeued jobs (usually 2 minutes), but loses the old job's age priority."""
    hang_timeout_s: int = 900
    """Treat the workers as hung after this many seconds without progress. Set it longer than any step, batch or save takes."""
    exclude_after: int = 2
    """Exclude a node from the run's jobs after this many failures on it: hangs, workers killed by a signal, lost nodes; not
    exceptions."""
    forget_h: int = 24
    """Forget a node's failures after this many hours."""

    @property
    def build_timeout_s(self) -> int:
        """How long the recipe may take to build on the slowest rank: listing a large data set is not a hang."""
        return max(self.hang_timeout_s, _LEAST_BUILD_TIMEOUT_S)


@dataclass(frozen=True, kw_only=True)
class SnapshotSpec(CheckedSpec, section="snapshot", above_zero=("max_mb",)):
    """The copy of your code that a job runs."""

    enabled: bool = True
    """Copy the code at submit, so that later edits do not change the job. If false, the job imports the code from its directory."""
    max_mb: int = 100
    """Refuse to copy more code than this, in MB."""


@dataclass(frozen=True, kw_only=True)
class ContainerSpec(CheckedSpec, section="container"):
    """The container image that the workers run in."""

    image: str | None = None
    """Image file or directory; for pyxis also an image address; for Docker an image name. Unset: no container."""
    runtime: Literal["auto", "apptainer", "singularity", "pyxis", "docker"] = "auto"
    """The container runtime. `auto`: Apptainer, or else Singularity, from the job's PATH. Docker works without Slurm only."""
    python: str = "python3"
    """Name or path of Python in the image. It must have PyTorch and the packages that ddp_hpc needs."""
    binds: tuple[str, ...] = ()
    """More paths to mount in the container, `SOURCE[:TARGET[:ro]]`."""
    gpus: Literal["auto", "nvidia", "rocm", "none"] = "auto"
    """Whose GPU driver the container gets (`--nv`, `--rocm`). `auto`: NVIDIA's, if the run asks for GPUs."""
    options: tuple[str, ...] = ()
    """More options for the runtime, one for each item (`--fakeroot`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_line("container", **vars(self))


@dataclass(frozen=True, kw_only=True)
class StageSpec(CheckedSpec, section="stage"):
    """What to copy to each node's local disk before the workers start, on Slurm."""

    dir: str | None = None
    """A directory on each node's local disk (`/local`, `$TMPDIR`). The container's image file (`container.image`) or `stage.archive` is copied
    there. Unset: the nodes read them from the shared file system."""
    archive: str | None = None
    """A Python environment packed with conda-pack or venv-pack (`env.tar.gz`); its Python runs the workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_line("stage", **vars(self))
        require(
            self.archive is None or self.dir is not None,
            "`stage.archive` is set, but `stage.dir` is not. Set it to a directory on each node's local disk.",
        )


@dataclass(frozen=True, kw_only=True)
class NetworkSpec(CheckedSpec, section="network"):
    """The network that the ranks meet on."""

    interfaces: tuple[str, ...] = ()
    """Interfaces to prefer on rank zero's node, the best first (`hsn*`). Unset: the fastest network that all nodes share."""


NotifyEvent = Literal["start", "end", "failure", "no_progress", "save_failed"]


@dataclass(frozen=True, kw_only=True)
class NotifySpec(CheckedSpec, section="notify"):
    """A command of yours that the run starts when something happens to it."""

    command: tuple[str, ...] = ()
    """The command, one item a word (`[./tell-me.sh]`); it gets DDP_HPC_EVENT and other variables (docs/survival.md). It is killed
    after 30 s, and the run goes on whatever becomes of it."""
    on: tuple[NotifyEvent, ...] = ("start", "end", "failure", "no_progress", "save_failed")
    """When to start it: at the run's first attempt, when the run has finished or was stopped, when an attempt fails, when no
    worker has made progress for half of `restart.hang_timeout_s`, and when an attempt's first save fails."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_command("notify", self.command)


@dataclass(frozen=True, kw_only=True)
class PreflightSpec(CheckedSpec, section="preflight"):
    """The check of a job's nodes before its workers start, on Slurm."""

    enabled: bool = False
    """Check the nodes first: network, names, clocks, disks, software, and whether all see the run's directory and data (docs/doctor.md)."""
    on_fail: Literal["stop", "warn", "exclude"] = "stop"
    """What a failed check does: `stop` ends the run; `exclude` puts the job back into the queue without the nodes that the check names,
    and ends the run where it names none; `warn` only prints it."""


@dataclass(frozen=True, kw_only=True)
class DebugSpec(CheckedSpec, section="debug"):
    """What helps to find an error, and costs time."""

    nccl: Literal["off", "info", "trace"] = "off"
    """What NCCL and torch.distributed log, into files of the run's directory (`logs/nccl/`): `info`, which networks and transports
    they choose; `trace`, each call. Variables of `env` win."""
    nan: Literal["auto", "always", "never"] = "auto"
    """Check each gradient for NaN before the ranks exchange it, so that the rank is named in which it arose: `auto`, in a run that is
    submitted again after it has diverged, and only where NaN ends a run (`train.on_nonfinite=stop`, not with fp16)."""


@dataclass(frozen=True, kw_only=True)
class LaunchSpec(CheckedSpec):
    """What launching knows of a run: its name, its machines, and how its workers are started and restarted."""

    name: str
    """Name of the run and of its directory. Default: the configuration file's name without its ending."""
    runs_dir: str = DEFAULT_RUNS_DIR
    """The directory of all runs; on a cluster, all nodes must share it."""
    launcher: Literal["agent", "srun", "torchrun"] = "agent"
    """What starts the workers: `agent`, one process on each node that forks them; `srun`, one Slurm task for each worker; or
    `torchrun` on each node. Without Slurm it is always `agent`."""
    resources: ResourcesSpec = field(default_factory=ResourcesSpec)
    slurm: SlurmSpec = field(default_factory=SlurmSpec)
    torchrun: TorchrunSpec = field(default_factory=TorchrunSpec)
    restart: RestartSpec = field(default_factory=RestartSpec)
    snapshot: SnapshotSpec = field(default_factory=SnapshotSpec)
    container: ContainerSpec = field(default_factory=ContainerSpec)
    stage: StageSpec = field(default_factory=StageSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    notify: NotifySpec = field(default_factory=NotifySpec)
    preflight: PreflightSpec = field(default_factory=PreflightSpec)
    debug: DebugSpec = field(default_factory=DebugSpec)
    env: Mapping[str, Any] = field(default_factory=dict)
    """Environment variables for the run's processes; they win over those of the shell that submits (`env.NCCL_DEBUG=INFO`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            RUN_NAME_PATTERN.fullmatch(self.name) is not None,
            f"`name` is {self.name!r}, but it becomes a directory's name: use at most 128 letters, digits, "
            "`.`, `_` and `-`, and begin with a letter or a digit.",
        )
        require(
            self.stage.archive is None or self.container.image is None,
            "`stage.archive` and `container.image` are both set, but workers can use only one of them. Unset the other.",
        )
        for variable, value in self.env.items():
            _check_variable(variable, value)

    @property
    def environment_key(self) -> str:
        """The key by which the job's Python may differ from this host's; empty where it is the same."""
        keys = {
            "container.image": self.container.image,
            "stage.archive": self.stage.archive,
            "slurm.modules": self.slurm.modules,
            "slurm.setup": self.slurm.setup,
            "slurm.template": self.slurm.template,
            "env.PYTHONPATH": "PYTHONPATH" in self.env,
        }
        return next((key for key, value in keys.items() if value), "")

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables that the run sets; a variable that is null stays as it is."""
        return {name: str(value) for name, value in self.env.items() if value is not None}

    @property
    def path(self) -> Path:
        return Path(self.runs_dir).expanduser().absolute() / self.name

    @property
    def mem_gb(self) -> int | None:
        """Memory of each node to ask Slurm for; None for the cluster's default, which often depends on the GPUs."""
        resources = self.resources
        if resources.mem_gb is None and resources.num_gpus == 0:
            return _CPU_WORKER_GB * resources.local_world_size
        return resources.mem_gb


def _check_variable(name: str, value: object) -> None:
    """Refuse a variable that no process can have, or that ddp_hpc or Slurm sets."""
    require(
        _VARIABLE_PATTERN.fullmatch(name) is not None,
        f"`env` has {name!r}, but a variable's name may have only letters, digits and `_`.",
    )
    require(
        name not in _OUR_VARIABLES and not name.startswith("SLURM_"),
        f"`env.{name}` is set, but ddp-hpc or Slurm sets {name} for each worker. Remove it.",
    )
    require(
        value is None or (isinstance(value, (str, int, float)) and not isinstance(value, bool)),
        f"`env.{name}` is {value!r}, but a variable holds text. Put the value in quotes.",
    )
    require(
        "\0" not in str(value), f"`env.{name}` is {value!r}, but a variable cannot hold a NUL character. Remove it."
    )
