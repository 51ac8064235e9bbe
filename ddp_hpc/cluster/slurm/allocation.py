"""What the SLURM_* variables say about a job and about this process in it. No other module reads them."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.slurm.hostlist import expand_hostlist
from ddp_hpc.run.world import World

log = logging.getLogger(__name__)

ProcessKind = Literal["task", "shell on a node", "shell outside"]
"""`task`: srun started this process (with `--pty`, too). `shell on a node`: a batch script or an interactive step on one of
the job's nodes. `shell outside`: the shell of salloc on a login node. What a shell exports reaches all tasks of the job."""

_COUNT_PATTERN = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)
_CPUS_PATTERN = re.compile(r"(\bcpu[:=])\d+", re.ASCII)
_ADVICE = "Slurm sets this variable: remove whatever changes or unsets it, such as a line in your shell's startup file."
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm gives the batch script, the interactive step of salloc and the external step the highest step ids (slurm.h); 26.05
writes them as negative numbers (measured: -5 in a batch script), 22.05 and 24.11 as 4294967291, or not at all."""


@dataclass(frozen=True, kw_only=True)
class StepTask:
    """One task of a job step. Nodes and tasks are those of the step; the job may have more."""

    step_id: int
    rank: int
    """SLURM_PROCID: the task's number in the step, for every `--distribution`."""
    local_rank: int
    node_rank: int
    node_names: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    distribution: str = "block"
    cpus_per_task: int | None = None
    """The value of `--cpus-per-task`; None where the step was started without it."""

    @property
    def num_nodes(self) -> int:
        return len(self.node_names)

    @property
    def world_size(self) -> int:
        return sum(self.tasks_per_node)

    @property
    def local_world_size(self) -> int:
        """Number of tasks on this node."""
        return self.tasks_per_node[self.node_rank]

    @property
    def block_rank(self) -> int:
        """The rank that this task would have with `--distribution=block`, where tasks fill one node after the other."""
        return sum(self.tasks_per_node[: self.node_rank]) + self.local_rank

    @property
    def rank_zero_node(self) -> str | None:
        """The name of rank zero's node; None where a hostfile (`--distribution=arbitrary`) may put it on any node."""
        if self.rank == 0:
            return self.node_names[self.node_rank]
        # Slurm sorts the node list of a step with a hostfile, too, and does not pass the hostfile on to the tasks:
        # https://slurm.schedmd.com/srun.html#OPT_distribution
        return None if self.distribution.startswith("arbitrary") and self.num_nodes > 1 else self.node_names[0]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A Slurm job, as the environment of one of its processes describes it."""

    job_id: str
    """Each task of a job array has a job id of its own."""
    array_job_id: str | None = None
    array_task_id: int | None = None
    restart_count: int = 0
    partition: str | None = None
    node_names: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    """Tasks on each node of the job; in a step, srun replaces the variable, so they are those of the step."""
    cpus_per_task: int | None = None
    cpus_on_node: int | None = None
    node_name: str | None = None
    """Slurm's name for this node; None on hosts that are no node of the job."""
    end_time: float | None = None
    """When the time limit ends the job, in seconds since the epoch; None on versions of Slurm that do not set it."""
    step: StepTask | None = None
    """None in a shell."""

    @property
    def scontrol_id(self) -> str:
        """The id to give to scontrol: `ARRAY_TASK` for a task of an array, since the array's plain id means all of its tasks."""
        is_task = self.array_job_id is not None and self.array_task_id is not None
        return f"{self.array_job_id}_{self.array_task_id}" if is_task else self.job_id

    @property
    def process_kind(self) -> ProcessKind:
        if self.step is not None:
            return "task"
        return "shell on a node" if self.node_name in self.node_names else "shell outside"

    @property
    def is_on_first_node(self) -> bool:
        """Whether this process runs on the job's first node, where Slurm runs the batch script."""
        return self.node_name == self.node_names[0]


def claimed_job_id(environ: Mapping[str, str]) -> str | None:
    """Return the job that the variables name. It may have ended long ago: a shell or a tmux keeps its variables."""
    return environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID") or None


def claimed_nodes(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Return the nodes of the job that the variables name; None where they cannot be read."""
    with suppress(ConfigError):
        return frozenset(_node_names(environ, "SLURM_JOB_NODELIST"))
    return None


def claimed_cluster(environ: Mapping[str, str]) -> str:
    """Return the name of the cluster whose job the variables name: of several, a shell may ask another one; empty where it is not said."""
    return environ.get("SLURM_CLUSTER_NAME", "")


def is_one_of_many_tasks(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is one of several tasks of a step, and not a shell, nor a step of a single task such as an interactive one."""
    allocation = None
    with suppress(ConfigError):
        allocation = read_allocation(environ)
    return allocation is not None and allocation.step is not None and allocation.step.world_size > 1


CLUSTER_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET"})
"""Variables that say where the cluster's configuration and the user's credentials are."""


def without_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what describes a job of Slurm."""
    return {
        name: value
        for name, value in environ.items()
        if name in CLUSTER_VARIABLES or not name.startswith(("SLURM_", "SLURMD_"))
    }


_ASKED_GPUS = ("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "tres-per-task", "cpus-per-gpu")
"""Options that srun also reads from variables."""


def outer_job_variables(environ: Mapping[str, str], sent: Collection[str]) -> list[str]:
    """Return the variables by which srun would ask for the GPUs of another job, in which plain sbatch was called.

    `sent` has the options of this job: sbatch sets their variables anew.
    """
    names = (f"SLURM_{option.replace('-', '_').upper()}" for option in _ASKED_GPUS if option not in sent)
    return [name for name in names if name in environ]


def is_in_job(environ: Mapping[str, str]) -> bool:
    """Tell whether this process is part of a job, or was started from within one."""
    return claimed_job_id(environ) is not None


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job that this process is part of, or None outside of jobs.

    A variable that a run can do without, and that holds a text which no Slurm known here writes, counts as not set. One that says
    where this process is must be there.
    """
    job_id = claimed_job_id(environ)
    if job_id is None:
        return None
    return Allocation(
        job_id=job_id,
        array_job_id=environ.get("SLURM_ARRAY_JOB_ID") or None,
        array_task_id=_number(environ, "SLURM_ARRAY_TASK_ID"),
        restart_count=_number(environ, "SLURM_RESTART_COUNT") or 0,
        partition=environ.get("SLURM_JOB_PARTITION") or None,
        node_names=_node_names(environ, "SLURM_JOB_NODELIST"),
        tasks_per_node=_task_counts(environ, "SLURM_TASKS_PER_NODE"),
        cpus_per_task=_number_if_readable(environ, "SLURM_CPUS_PER_TASK"),
        cpus_on_node=_number_if_readable(environ, "SLURM_CPUS_ON_NODE"),
        node_name=environ.get("SLURMD_NODENAME") or None,
        end_time=_number_if_readable(environ, "SLURM_JOB_END_TIME"),
        step=_read_step(environ),
    )


def granted_cpus(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return how many CPUs Slurm gave this process and its children, and how many all processes of the job on this node.

    None outside of a job's nodes, and if Slurm's variables do not say. Only CPU binding, where a cluster uses it, tells which ones.
    """
    try:
        allocation = read_allocation(environ)
        counts = _task_counts(environ, "SLURM_JOB_CPUS_PER_NODE") if environ.get("SLURM_JOB_CPUS_PER_NODE") else ()
    except ConfigError:
        return None
    if allocation is None or allocation.process_kind == "shell outside":
        return None
    step, on_node = allocation.step, allocation.cpus_on_node
    of_task = on_node
    if step is not None:
        of_task = step.cpus_per_task or (on_node and max(1, on_node // step.local_world_size))
    if of_task is None:
        return None
    by_name = dict(zip(allocation.node_names, counts, strict=False))
    of_job = by_name.get(allocation.node_name or "", on_node or of_task)
    return of_task, max(of_task, of_job)


def task_variables(  # noqa: PLR0913  the numbers of one process
    environ: Mapping[str, str], *, rank: int, local_rank: int, world_size: int, local_world_size: int, node_rank: int
) -> dict[str, str]:
    """Return what srun would set for a worker if it started one task for each; nothing outside of jobs, and for such a task."""
    ours = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank), "SLURM_NTASKS": str(world_size)}
    if not is_in_job(environ) or ours.items() <= environ.items():
        return {}
    num_nodes, first = world_size // local_world_size, node_rank * local_world_size
    on_each = f"{local_world_size}(x{num_nodes})" if num_nodes > 1 else f"{local_world_size}"
    where_set = {
        "SLURM_NTASKS_PER_NODE": f"{local_world_size}",
        "SLURM_TASKS_PER_NODE": on_each,
        "SLURM_STEP_TASKS_PER_NODE": on_each,
        "SLURM_STEP_NUM_TASKS": f"{world_size}",
        "SLURM_GTIDS": ",".join(map(str, range(first, first + local_world_size))),
    }
    if granted := granted_cpus(environ):
        cpus = str(max(1, granted[0] // local_world_size))
        where_set["SLURM_CPUS_PER_TASK"] = cpus
        # srun in a worker's script refuses to start where the two differ (23.11 and newer have both).
        where_set["SLURM_TRES_PER_TASK"] = _CPUS_PATTERN.sub(rf"\g<1>{cpus}", environ.get("SLURM_TRES_PER_TASK", ""))
    more = {name: value for name, value in where_set.items() if name in environ}
    return {**ours, "SLURM_NPROCS": str(world_size), "SLURM_NODEID": str(node_rank), **more}


def gpu_numbers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return Slurm's numbers of the GPUs of this step, or else of the job; empty if Slurm does not say."""
    text = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    return tuple(part for part in text.split(",") if part)


def num_granted_gpus(environ: Mapping[str, str]) -> int | None:
    """Return how many GPUs of this node Slurm has given to the job; None where it does not say."""
    text = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(text) if _is_number(text) else len(gpu_numbers(environ)) or None


def node_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's name for this node, or the host name if Slurm gives none."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def step_task(environ: Mapping[str, str]) -> StepTask:
    """Return the task of a job step that this process is."""
    allocation = read_allocation(environ)
    if allocation is None or allocation.step is None:
        raise ConfigError(
            "ddp-hpc's process on this node is not a task of a Slurm job step, so it has no rank. The job script starts it with `srun`: if you changed that line, restore it, or write the script again with `ddp-hpc render`."
        )
    return allocation.step


def shape_problem(allocation: Allocation, asked: World) -> str | None:
    """Return why a run that asked for this world does not fit into the job, or None if it fits."""
    num_nodes, tasks_per_node = asked.num_nodes, asked.workers_per_node
    if len(allocation.node_names) != num_nodes:
        return (
            f"`resources.nodes` is {num_nodes}, but job {allocation.job_id} has {len(allocation.node_names)} nodes. "
            f"Submit the run again with `ddp-hpc submit`, or start a job with `--nodes={num_nodes}`."
        )
    fewest = min(allocation.tasks_per_node)
    if fewest < tasks_per_node:
        return (
            f"The run needs {tasks_per_node} workers on each node, but job {allocation.job_id} has a node with room for only {fewest}. "
            f"Submit the run again with `ddp-hpc submit`, or start a job with `--ntasks-per-node={tasks_per_node}`."
        )
    return None


def expand_counts(text: str, *, name: str = "The list of counts") -> list[int]:
    """Return the counts in `4(x2),1`: 4, 4, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT_PATTERN.fullmatch(part)
        if match is None:
            raise ConfigError(f"{name} is {text!r}, but {part!r} is not of the form `4` or `4(x2)`. {_ADVICE}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _read_step(environ: Mapping[str, str]) -> StepTask | None:
    """Return this task of a step, or None in a shell."""
    # SLURM_PROCID does not tell a task: a batch script has it, too, and SLURM_NODEID and SLURM_LOCALID, all 0, but no
    # SLURM_STEP_ID of a numbered step. The shell of salloc on a login node has none of them.
    # https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    if environ.get("SLURM_STEP_ID", "").startswith("-"):
        return None
    step_id = _number_if_readable(environ, "SLURM_STEP_ID")
    if step_id is None or step_id >= _FIRST_SPECIAL_STEP:
        return None
    task = StepTask(
        step_id=step_id,
        rank=_needed(environ, "SLURM_PROCID"),
        local_rank=_needed(environ, "SLURM_LOCALID"),
        node_rank=_needed(environ, "SLURM_NODEID"),
        node_names=_node_names(environ, "SLURM_STEP_NODELIST"),
        tasks_per_node=_task_counts(environ, "SLURM_STEP_TASKS_PER_NODE"),
        distribution=environ.get("SLURM_DISTRIBUTION") or "block",
        cpus_per_task=_number_if_readable(environ, "SLURM_CPUS_PER_TASK"),
    )
    return task if _is_of_this_job(task, environ) else None


def _is_of_this_job(task: StepTask, environ: Mapping[str, str]) -> bool:
    """Tell a task from a shell that inherited the variables of another job's step."""
    # `sbatch` and `salloc`, called inside a step, pass the step's variables on to the new job (measured: 22.05). For its own
    # tasks, srun sets the job's variables again, so the two agree. With `--preserve-env` srun does not do that, and its tasks
    # look like shells here.
    name = environ.get("SLURMD_NODENAME")
    return (
        task.node_rank < min(task.num_nodes, len(task.tasks_per_node))
        and name in (None, "", task.node_names[task.node_rank])
        and set(task.node_names) <= set(_node_names(environ, "SLURM_JOB_NODELIST"))
        and _task_counts(environ, "SLURM_TASKS_PER_NODE") == task.tasks_per_node
    )


def _node_names(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    names = tuple(expand_hostlist(_text(environ, name)))
    if not names:
        raise ConfigError(f"{name} is {environ[name]!r}, but it must name the nodes of the Slurm job. {_ADVICE}")
    return names


def _task_counts(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    return tuple(expand_counts(_text(environ, name), name=name))


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name)
    if not text:
        raise ConfigError(f"{name} is not set, but SLURM_JOB_ID is, so this is a Slurm job. {_ADVICE}")
    return text


def _needed(environ: Mapping[str, str], name: str) -> int:
    text = _text(environ, name)
    if not _is_number(text):
        raise ConfigError(f"{name} is {text!r}, but it must be a number. {_ADVICE}")
    return int(text)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    return _needed(environ, name) if environ.get(name) else None


def _number_if_readable(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    return _read_number(name, text) if text else None


@cache
def _read_number(name: str, text: str) -> int | None:
    """Return the number; say once in this process that a variable cannot be read."""
    if _is_number(text):
        return int(text)
    log.warning("%s is %r, and not a number, so it counts as not set. The run goes on without it.", name, text)
    return None


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 19
