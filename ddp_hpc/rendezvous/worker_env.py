"""Every variable that ddp_hpc gives a worker: its value, where the value comes from, and why. Pure; no other module makes one.

The agent, the task, torchrun's node and `ddp-hpc env` gather facts (ranks, endpoint, interface, CPUs) in ways of their own;
from the same facts they all get the same variables here. A worker carries its table in one more variable, so that
`ddp-hpc env` in a worker, or in what it starts, can say what the launcher gave it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ddp_hpc.rendezvous.choice import Refused
from ddp_hpc.slurm.allocation import Allocation, StepPlace

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
ENDPOINT = ("MASTER_ADDR", "MASTER_PORT")
TABLE = "_DDP_HPC_WORKER_ENV"
"""Variable: a worker's table, as `WorkerEnv.environ` writes it."""
USERS = "environment"
"""The source of what the user has set."""
OURS = "ddp-hpc"
UNKNOWN = "-"
"""The source of what is not known."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A value, and how it is known."""

    value: str | None = None
    """Unset where it is not known."""
    source: str = UNKNOWN
    rule: str
    refused: tuple[Refused, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """All variables of one process."""

    place: str
    """What this process is, in words."""
    variables: Mapping[str, Fact]

    def value(self, name: str) -> str | None:
        """Return one variable's value."""
        return self.variables[name].value

    @property
    def given(self) -> dict[str, str]:
        """What is known, and not set by the user already."""
        return {
            name: fact.value for name, fact in self.variables.items() if fact.value is not None and fact.source != USERS
        }

    @property
    def environ(self) -> dict[str, str]:
        """What a launcher sets for its worker: `given`, and this table itself."""
        rows = {name: (fact.value, fact.source, fact.rule) for name, fact in self.variables.items()}
        return {**self.given, TABLE: json.dumps({"place": self.place, "variables": rows})}


def recorded(environ: Mapping[str, str]) -> WorkerEnv | None:
    """Return the table of the worker that this process is, or descends from, as far as it still holds; None elsewhere."""
    try:
        table = json.loads(environ.get(TABLE, ""))
        rows = {name: Fact(value=row[0], source=row[1], rule=row[2]) for name, row in table["variables"].items()}
        place = str(table["place"])
    except (ValueError, TypeError, LookupError, AttributeError):  # none, or somebody has cut it
        return None
    return WorkerEnv(place=place, variables={name: _as_it_is_now(name, fact, environ) for name, fact in rows.items()})


def _as_it_is_now(name: str, fact: Fact, environ: Mapping[str, str]) -> Fact:
    now = environ.get(name)
    if now == fact.value:
        return fact
    rule = f"changed since the worker was started with {fact.value!r} ({fact.source}: {fact.rule})"
    return Fact(value=now, source=USERS, rule=rule)


# --- from facts to variables -------------------------------------------------------------------------------------------


def node_variables(interface: Fact, threads: Fact) -> dict[str, Fact]:
    """Return what all workers of a node have alike.

    NCCL takes a name for the beginning of names unless `=` stands before it; gloo compares whole names, and would look
    for one that begins with `=` (measured: PyTorch 2.13).
    """
    exact = None if interface.value is None else f"={interface.value}"
    return {
        "NCCL_SOCKET_IFNAME": replace(interface, value=exact),
        "GLOO_SOCKET_IFNAME": interface,
        **library_variables(threads),
    }


def library_variables(threads: Fact) -> dict[str, Fact]:
    """Return what PyTorch and its libraries read when they are loaded: before the import, wherever workers will meet.

    PyTorch's store asks for the name of every peer (getnameinfo in c10d's socket.cpp), which takes ten seconds a process
    where reverse DNS is broken. One try of one second is the least that resolv.conf(5) allows.
    """
    return {
        "OMP_NUM_THREADS": threads,
        "CUBLAS_WORKSPACE_CONFIG": Fact(
            value=":4096:8",
            source=OURS,
            rule="`train.deterministic` needs it of cuBLAS, which reads it when it is loaded",
        ),
        "PYTORCH_NVML_BASED_CUDA_CHECK": Fact(
            value="1", source=OURS, rule="looking for GPUs must not initialise CUDA before workers are forked"
        ),
        "RES_OPTIONS": Fact(
            value="timeout:1 attempts:1", source=OURS, rule="broken reverse DNS must not stall the start"
        ),
    }


def settled(made: Mapping[str, Fact], environ: Mapping[str, str], *, fixed: Collection[str] = ()) -> dict[str, Fact]:
    """Let what is set already win, even if it is set to nothing; but `fixed` variables are as they were made.

    A rank or an endpoint that is set to nothing counts as unset: no process can do without.
    """
    return {name: fact if name in fixed else _or_users(name, fact, environ) for name, fact in made.items()}


def _or_users(name: str, made: Fact, environ: Mapping[str, str]) -> Fact:
    """Return the user's value, and what it would be else."""
    users = environ.get(name)
    if users is None or (not users and name in {*RANKS, *ENDPOINT}):
        return made
    is_same = made.value in (None, users)
    rule = "set already, and left alone"
    return Fact(
        value=users, source=USERS, rule=rule if is_same else f"{rule}; else it would be {made.value!r} ({made.source})"
    )


def launched(
    by: str, made: Mapping[str, Fact], environ: Mapping[str, str], import_paths: Sequence[str] = ()
) -> WorkerEnv:
    """Return the table of a worker that a launcher of ours starts: its ranks and endpoint hold, whatever is set already."""
    rank, local_rank, world_size, local_world_size, node_rank = (made[name].value for name in RANKS)
    place = (
        f"rank {rank} of {world_size}, worker {local_rank} of {local_world_size} on node {node_rank}, started by {by}"
    )
    variables = settled(made, environ, fixed={*RANKS, *ENDPOINT})
    return WorkerEnv(place=place, variables={**variables, **import_path(import_paths, environ.get("PYTHONPATH"))})


def import_path(paths: Sequence[str], python_path: str | None) -> dict[str, Fact]:
    """Return the variable that has the user's code in front, where the run has such code."""
    rule = "the user's code, before what was set; a worker imports it after Python's own modules"
    return {"PYTHONPATH": Fact(value=python_path, source=OURS, rule=rule)} if paths else {}


# --- facts -------------------------------------------------------------------------------------------------------------


def ranks_by_shape(*, node_rank: int, num_nodes: int, num_workers: int, local_rank: int) -> dict[str, Fact]:
    """Return the ranks of a worker where all nodes have as many."""
    rows = (
        (node_rank * num_workers + local_rank, "ranks count the workers node by node"),
        (local_rank, "the worker's number on its node"),
        (num_nodes * num_workers, f"nodes: {num_nodes}, workers on each: {num_workers}"),
        (num_workers, "every node has as many"),
        (node_rank, "the node's number"),
    )
    return _ranks((str(number), OURS, rule) for number, rule in rows)


def ranks_of_step(step: StepPlace) -> dict[str, Fact]:
    """Return the ranks of a task that srun has started."""
    tasks = ", ".join(map(str, step.tasks_per_node))
    rows = (
        (step.rank, "Slurm (SLURM_PROCID)", _rank_rule(step)),
        (step.local_rank, "Slurm (SLURM_LOCALID)", "the task's number on its node"),
        (step.world_size, "Slurm (SLURM_STEP_TASKS_PER_NODE)", f"the step's tasks together: {tasks}"),
        (step.local_world_size, "Slurm (SLURM_STEP_TASKS_PER_NODE)", f"the tasks of this node, of {tasks}"),
        (step.node_rank, "Slurm (SLURM_NODEID)", "the node's number in the step"),
    )
    return _ranks((str(number), source, rule) for number, source, rule in rows)


def _rank_rule(step: StepPlace) -> str:
    """Say whose word it is where two differ."""
    rule = "the task's number in the step, by Slurm's own word"
    if step.rank == step.block_rank:
        return rule
    return (
        f"{rule}; with `--distribution={step.distribution}` ranks of a node are not consecutive "
        f"(`--distribution=block` would make it {step.block_rank})"
    )


def ranks_of_shell(allocation: Allocation) -> dict[str, Fact]:
    """Return what a shell that speaks for the whole job knows of its tasks' ranks."""
    tasks = allocation.tasks_per_node
    listed, source = ", ".join(map(str, tasks)), "Slurm (SLURM_TASKS_PER_NODE)"
    is_even = len(set(tasks)) == 1
    by_task = (None, UNKNOWN, "each task of a step has its own; in a shell nobody does")
    world = (str(sum(tasks)), source, f"the job's tasks together: {listed}; for a step of all of them")
    local = (str(tasks[0]), source, "every node has as many") if is_even else (None, UNKNOWN, f"nodes differ: {listed}")
    return _ranks((by_task, by_task, world, local, by_task))


def _ranks(rows: Iterable[tuple[str | None, str, str]]) -> dict[str, Fact]:
    """Return facts by the names of `RANKS`, from rows of value, source, rule."""
    return {
        name: Fact(value=value, source=source, rule=rule)
        for name, (value, source, rule) in zip(RANKS, rows, strict=True)
    }


def of_torchrun(environ: Mapping[str, str]) -> dict[str, Fact]:
    """Return the ranks and the endpoint that torchrun has given; it calls the node's number GROUP_RANK.

    Its agents meet at the endpoint that the supervisor chose, and open a port of torchrun's choice for their workers there.
    """
    theirs = {name: "GROUP_RANK" if name == "NODE_RANK" else name for name in (*RANKS, *ENDPOINT)}
    rule = "as torchrun's agents agreed"
    return {name: Fact(value=environ[it], source=f"torchrun ({it})", rule=rule) for name, it in theirs.items()}


def endpoint(address: Fact, port: Fact) -> dict[str, Fact]:
    """Return where the ranks meet."""
    return dict(zip(ENDPOINT, (address, port), strict=True))


def endpoint_of_run(address: str, port: int, *, is_alone: bool = False) -> dict[str, Fact]:
    """Return where the ranks of a run meet; `is_alone`, it has this machine alone."""
    rule = "the run has this machine alone" if is_alone else "the job's log has `ranks meet at`, and why there"
    source = "agent" if is_alone else "supervisor"
    return endpoint(*(Fact(value=str(value), source=source, rule=rule) for value in (address, port)))


def threads(num_cpus: int, num_workers: int = 1, cpus_per_worker: int | None = None, *, source: str) -> Fact:
    """Return how many threads each worker of a node computes with, who may use so many CPUs together."""
    each = cpus_per_worker or num_cpus // num_workers
    if not 0 < each * num_workers <= num_cpus:
        each = max(1, num_cpus) if num_workers == 1 else 1
    asked = "" if cpus_per_worker is None else f"; `resources.cpus_per_worker` is {cpus_per_worker}"
    return Fact(value=str(each), source=source, rule=f"CPUs here: {num_cpus}, workers: {num_workers}{asked}")
