"""What Slurm's variables say of a job, and of the place of this process in it: the only reader of them."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_hpc.errors import ConfigError
from ddp_hpc.slurm.hostlist import expand_hostlist

Where = Literal["task", "shell on a node", "shell outside"]
"""A task that srun has started (with `--pty` too). Or a shell that speaks for the whole job: a batch script or an
interactive step, on one of the job's nodes; or salloc's, on a login node."""

_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the batch script, salloc's interactive step and the external step from the upper end down."""


@dataclass(frozen=True, kw_only=True)
class StepPlace:
    """One task's place in its job step. Nodes and tasks are the step's, which may be fewer than the job's."""

    step_id: int
    rank: int
    """The task's number in the step, by Slurm's own word, however tasks are distributed."""
    local_rank: int
    node_rank: int
    node_names: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    distribution: str = "block"
    cpus_per_task: int | None = None
    """As asked for with `--cpus-per-task`; unset: nobody asked."""
    launch_address: str | None = None
    """Of the host that srun runs on, which need not be a node of the job."""

    @property
    def num_nodes(self) -> int:
        return len(self.node_names)

    @property
    def world_size(self) -> int:
        return sum(self.tasks_per_node)

    @property
    def local_world_size(self) -> int:
        """Tasks of this node."""
        return self.tasks_per_node[self.node_rank]

    @property
    def block_rank(self) -> int:
        """The rank this task would have under `--distribution=block`; else, ranks of a node are not consecutive."""
        return block_rank(self.tasks_per_node, self.node_rank, self.local_rank)

    @property
    def rank_zero_node(self) -> str | None:
        """The name of rank zero's node; None where a hostfile (`--distribution=arbitrary`) may have moved it.

        Slurm sorts the step's node list all the same, and does not hand the hostfile to the tasks.
        """
        if self.rank == 0:
            return self.node_names[self.node_rank]
        return None if self.distribution.startswith("arbitrary") and self.num_nodes > 1 else self.node_names[0]


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A job of Slurm's, as the environment of one of its processes tells it."""

    job_id: str
    """Each task of an array has its own."""
    array_job_id: str | None = None
    array_task_id: int | None = None
    restart_count: int = 0
    partition: str | None = None
    node_names: tuple[str, ...]
    tasks_per_node: tuple[int, ...]
    """Of the job; inside a step, srun has put the step's in its place."""
    cpus_per_task: int | None = None
    cpus_on_node: int | None = None
    gpus_on_node: int | None = None
    node_name: str | None = None
    """This node's, as Slurm calls it; unset outside of nodes."""
    end_time: float | None = None
    """When the time limit ends the job, in seconds since the epoch; told by newer versions of Slurm."""
    step: StepPlace | None = None
    """Unset in shells."""

    @property
    def scontrol_id(self) -> str:
        """The job as scontrol is told of it, so that a task of an array means itself alone."""
        is_task = self.array_job_id is not None and self.array_task_id is not None
        return f"{self.array_job_id}_{self.array_task_id}" if is_task else self.job_id

    @property
    def is_step(self) -> bool:
        return self.step is not None

    @property
    def where(self) -> Where:
        if self.is_step:
            return "task"
        return "shell on a node" if self.node_name in self.node_names else "shell outside"

    @property
    def is_on_first_node(self) -> bool:
        """Whether this process runs on the job's first node, where batch scripts do."""
        return self.node_name == self.node_names[0]


def read_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the job that this process is part of, or None outside of all.

    Raises:
        ConfigError: where variables are missing or no numbers.
    """
    job_id = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job_id:
        return None
    return Allocation(
        job_id=job_id,
        array_job_id=environ.get("SLURM_ARRAY_JOB_ID") or None,
        array_task_id=_number(environ, "SLURM_ARRAY_TASK_ID"),
        restart_count=_number(environ, "SLURM_RESTART_COUNT") or 0,
        partition=environ.get("SLURM_JOB_PARTITION") or None,
        node_names=_names(environ, "SLURM_JOB_NODELIST"),
        tasks_per_node=_tasks(environ, "SLURM_TASKS_PER_NODE"),
        cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK"),
        cpus_on_node=_number(environ, "SLURM_CPUS_ON_NODE"),
        gpus_on_node=_number(environ, "SLURM_GPUS_ON_NODE"),
        node_name=environ.get("SLURMD_NODENAME") or None,
        end_time=_number(environ, "SLURM_JOB_END_TIME"),
        step=_read_step(environ),
    )


@dataclass(frozen=True, kw_only=True)
class CpuGrant:
    """How many CPUs Slurm has given; which ones only shows where it binds tasks to them."""

    num_of_task: int
    """To this process and what it starts."""
    num_of_job: int
    """To the whole job, on this node."""


def cpu_grant(environ: Mapping[str, str]) -> CpuGrant | None:
    """Return what this process was given; None outside of a job's nodes, and where Slurm's variables do not tell."""
    try:
        allocation = read_allocation(environ)
        counts = _tasks(environ, "SLURM_JOB_CPUS_PER_NODE") if environ.get("SLURM_JOB_CPUS_PER_NODE") else ()
    except ConfigError:
        return None
    if allocation is None or allocation.where == "shell outside":
        return None
    step, on_node = allocation.step, allocation.cpus_on_node
    of_task = on_node
    if step is not None:
        of_task = step.cpus_per_task or (on_node and max(1, on_node // step.local_world_size))
    if of_task is None:
        return None
    by_name = dict(zip(allocation.node_names, counts, strict=False))
    of_job = by_name.get(allocation.node_name or "", on_node or of_task)
    return CpuGrant(num_of_task=of_task, num_of_job=max(of_task, of_job))


def gpu_numbers(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the numbers that Slurm gives the GPUs of this step, or of the job; none where it does not say."""
    text = environ.get("SLURM_STEP_GPUS") or environ.get("SLURM_JOB_GPUS") or ""
    return tuple(part for part in text.split(",") if part)


def node_name(environ: Mapping[str, str]) -> str:
    """Return what Slurm calls this node; the host's own name where Slurm does not say."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def step_place(environ: Mapping[str, str]) -> StepPlace:
    """Return the place of a task that srun has started.

    Raises:
        ConfigError: where srun has not.
    """
    allocation = read_allocation(environ)
    if allocation is None or allocation.step is None:
        raise ConfigError("This process is no task of a Slurm job step, so it has no rank. Start it with `srun`.")
    return allocation.step


def shape_problem(allocation: Allocation, *, num_nodes: int, tasks_per_node: int) -> str | None:
    """Return why a run of this shape does not fit into the job, or None where it does."""
    if len(allocation.node_names) != num_nodes:
        return (
            f"`resources.nodes` is {num_nodes}, but job {allocation.job_id} has {len(allocation.node_names)}. "
            f"Submit again, or ask for as many with `--nodes={num_nodes}`."
        )
    fewest = min(allocation.tasks_per_node)
    if fewest < tasks_per_node:
        return (
            f"The run has {tasks_per_node} workers a node, but job {allocation.job_id} has room for {fewest} tasks on "
            f"a node. Submit again, or ask for them with `--ntasks-per-node={tasks_per_node}`."
        )
    return None


def expand_counts(text: str) -> list[int]:
    """Return the counts in `4(x2),1`: 4, 4, 1.

    Raises:
        ConfigError: where it is no such list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ConfigError(f"Slurm's counts are {text!r}, but {part!r} is not like `4` or `4(x2)`.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def block_rank(tasks_per_node: Sequence[int], node_rank: int, local_rank: int) -> int:
    """Return the rank of a task where nodes are filled one after the other."""
    return sum(tasks_per_node[:node_rank]) + local_rank


def _read_step(environ: Mapping[str, str]) -> StepPlace | None:
    """Return this task's place, or None in a shell.

    A batch script has a number 0 of everything too (SLURM_PROCID, SLURM_NODEID, SLURM_LOCALID); what it lacks is a
    step id. salloc's shell on a login node lacks all of them.
    """
    step_id = _number(environ, "SLURM_STEP_ID")
    if step_id is None or step_id >= _FIRST_SPECIAL_STEP:
        return None
    place = StepPlace(
        step_id=step_id,
        rank=_needed(environ, "SLURM_PROCID"),
        local_rank=_needed(environ, "SLURM_LOCALID"),
        node_rank=_needed(environ, "SLURM_NODEID"),
        node_names=_names(environ, "SLURM_STEP_NODELIST"),
        tasks_per_node=_tasks(environ, "SLURM_STEP_TASKS_PER_NODE"),
        distribution=environ.get("SLURM_DISTRIBUTION") or "block",
        cpus_per_task=_number(environ, "SLURM_CPUS_PER_TASK"),
        launch_address=environ.get("SLURM_LAUNCH_NODE_IPADDR") or None,
    )
    return place if _is_of_this_job(place, environ) else None


def _is_of_this_job(place: StepPlace, environ: Mapping[str, str]) -> bool:
    """Tell a task from a shell that has inherited a step's variables.

    `sbatch` and `salloc` from inside a step pass them on (measured: 22.05). srun, for its own, writes the plain
    variables anew, so that they agree; with `--preserve-env` it does not, and its tasks are taken for shells.
    """
    name = environ.get("SLURMD_NODENAME")
    return (
        place.node_rank < min(place.num_nodes, len(place.tasks_per_node))
        and name in (None, "", place.node_names[place.node_rank])
        and set(place.node_names) <= set(_names(environ, "SLURM_JOB_NODELIST"))
        and _tasks(environ, "SLURM_TASKS_PER_NODE") == place.tasks_per_node
    )


def _names(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    names = tuple(expand_hostlist(_text(environ, name)))
    if not names:
        raise ConfigError(f"{name} is {environ[name]!r}, which names no node, though this is a Slurm job.")
    return names


def _tasks(environ: Mapping[str, str], name: str) -> tuple[int, ...]:
    return tuple(expand_counts(_text(environ, name)))


def _text(environ: Mapping[str, str], name: str) -> str:
    text = environ.get(name)
    if not text:
        raise ConfigError(f"{name} is not set, though this is a Slurm job. Do not unset what Slurm sets.")
    return text


def _needed(environ: Mapping[str, str], name: str) -> int:
    return _parsed(name, _text(environ, name))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    return _parsed(name, text) if text else None


def _parsed(name: str, text: str) -> int:
    if not (text.isdecimal() and text.isascii()):
        raise ConfigError(f"{name} is {text!r}, but it must be a number.")
    return int(text)
