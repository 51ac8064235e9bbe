"""Make every variable that ddp_hpc sets for a worker: value, source and reason. Pure but for `private_cache`; no other module makes one.

The agent, the task, torchrun's node and `ddp-hpc env` gather facts (ranks, endpoint, interface, CPUs), each in its own
way. From equal facts they get equal variables here. A worker carries this table in one more variable, so that
`ddp-hpc env` in the worker, or in a child of it, can print what the launcher set.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_hpc.base.private_cache import private_cache_dir
from ddp_hpc.base.processes import kernel_text
from ddp_hpc.cluster.slurm.allocation import Allocation, StepTask, task_variables

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
ENDPOINT = ("MASTER_ADDR", "MASTER_PORT")
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
TABLE_VARIABLE = "_DDP_HPC_WORKER_ENV"
"""The variable that holds a worker's table, as `WorkerEnv.environ` writes it."""
USERS_CODE = "_DDP_HPC_USERS_CODE"
"""The variable with the paths that a launcher has put first into PYTHONPATH, in its format."""
GIVEN_VARIABLE = "_DDP_HPC_GIVEN"
"""The variable that holds what ddp_hpc has set besides the table: each value, and the one that it replaces."""
USERS = "environment"
"""Source of a value that the user set."""
OUR_SOURCE = "ddp-hpc"
UNKNOWN_SOURCE = "-"
"""Source of a value that is not known."""


@dataclass(frozen=True, kw_only=True)
class Sourced:
    """A value, where it comes from, and why it is this one."""

    value: str | None = None
    """None if it is not known."""
    source: str = UNKNOWN_SOURCE
    rule: str
    refused: Mapping[str, str] = field(default_factory=dict)
    """The candidates that were not chosen, each with the reason."""


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """All variables of one process."""

    process: str
    """What this process is: `task 3 of 8 in step 12.0, ...`."""
    variables: Mapping[str, Sourced]

    def value(self, name: str) -> str | None:
        return self.variables[name].value

    @property
    def given(self) -> dict[str, str]:
        """The variables that are known, and that the user did not set."""
        return {
            name: fact.value for name, fact in self.variables.items() if fact.value is not None and fact.source != USERS
        }

    @property
    def environ(self) -> dict[str, str]:
        """What a launcher sets for its worker: `given`, and this table itself."""
        rows = {name: (fact.value, fact.source, fact.rule) for name, fact in self.variables.items()}
        return {**self.given, TABLE_VARIABLE: json.dumps({"process": self.process, "variables": rows})}


def with_undo_record(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables to set, and the record by which `users_environ` takes them back."""
    before = users_environ(environ)
    record = {**_read_undo_record(environ), **{name: [value, before.get(name)] for name, value in variables.items()}}
    return {**variables, GIVEN_VARIABLE: json.dumps(record)}


def users_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what ddp_hpc gave the rank that this process descends from, unless it was changed since.

    Slurm's variables stay: those of another job may have the same values.
    """
    table = read_worker_env(environ)
    given = {name: [value, None] for name, value in table.given.items()} if table else {}
    given |= _read_undo_record(environ)
    now = {name: value for name, value in environ.items() if name not in _PRIVATE_VARIABLES}
    for name, (value, before) in given.items():
        if now.get(name) == value and not name.startswith("SLURM"):
            del now[name]
            now |= {} if before is None else {name: before}
    return now


def _read_undo_record(environ: Mapping[str, str]) -> dict[str, list[str | None]]:
    try:
        return {name: [value, before] for name, (value, before) in json.loads(environ.get(GIVEN_VARIABLE, "")).items()}
    except (ValueError, TypeError, AttributeError):  # none, or a damaged one
        return {}


def read_worker_env(environ: Mapping[str, str]) -> WorkerEnv | None:
    """Return the table of the worker that this process is or descends from, with changed values marked; None elsewhere."""
    try:
        table = json.loads(environ.get(TABLE_VARIABLE, ""))
        variables = {
            name: Sourced(value=row[0], source=row[1], rule=row[2]) for name, row in table["variables"].items()
        }
        process = str(table["process"])
    except (ValueError, TypeError, LookupError, AttributeError):  # no table, or a damaged one
        return None
    for name, fact in list(variables.items()):
        now = environ.get(name)
        if now != fact.value:
            rule = f"changed after the launcher set it to {fact.value!r} ({fact.source}: {fact.rule})"
            variables[name] = Sourced(value=now, source=USERS, rule=rule)
    return WorkerEnv(process=process, variables=variables)


# --- from facts to variables -------------------------------------------------------------------------------------------


def node_variables(interface: Sourced, threads: Sourced) -> dict[str, Sourced]:
    """Return the variables that are equal for all workers of a node."""
    # gloo and NCCL take this interface, and no other. NCCL reads a name as the beginning of names unless `=` stands before it; gloo compares whole names, and would search
    # for one that begins with `=` (measured: PyTorch 2.13;
    # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname).
    nccls = replace(interface, value=None if interface.value is None else f"={interface.value}")
    for file in ("/etc/nccl.conf", "~/.nccl.conf"):  # a variable that is set comes before what they say
        text = kernel_text(Path(os.path.expanduser(file)))  # noqa: PTH111  a Path raises an error where nobody has a home
        if re.search(r"^\s*NCCL_SOCKET_IFNAME\s*=", text, re.MULTILINE):
            nccls = Sourced(
                value=None, source=file, rule=f"{file} sets it, which NCCL reads where the variable is not set"
            )
    return {"NCCL_SOCKET_IFNAME": nccls, "GLOO_SOCKET_IFNAME": interface, **library_variables(threads)}


def library_variables(threads: Sourced) -> dict[str, Sourced]:
    """Return the variables that PyTorch and its libraries read when they are loaded; they must be set before the import."""
    return {
        "OMP_NUM_THREADS": threads,
        "CUBLAS_WORKSPACE_CONFIG": Sourced(
            value=":4096:8",
            source=OUR_SOURCE,
            rule="cuBLAS needs it for `train.deterministic`, and reads it when it is loaded",
        ),
        "PYTORCH_NVML_BASED_CUDA_CHECK": Sourced(
            value="1",
            source=OUR_SOURCE,
            rule="PyTorch then checks for GPUs without CUDA, which must not be initialised before the agent forks workers",
        ),
        # PyTorch's own place for it is /tmp/torchinductor_USER, whose pickles and modules the compiler loads, whoever made it.
        COMPILER_CACHE: Sourced(
            value=None if (cache := private_cache_dir()) is None else str(cache / "inductor"),
            source=OUR_SOURCE,
            rule="a directory that only you can enter, since `torch.compile` runs what it finds in its cache",
        ),
        # PyTorch's store resolves the name of every peer (getnameinfo in c10d's socket.cpp). If reverse DNS is broken, that
        # takes ten seconds for each process. Three tries of a second: a server that is busy may lose one, or need more for it.
        "RES_OPTIONS": Sourced(
            value="timeout:1 attempts:3",
            source=OUR_SOURCE,
            rule="keeps name lookups short, so that a broken reverse DNS does not delay the start",
        ),
    }


def keep_users_values(
    made: Mapping[str, Sourced], environ: Mapping[str, str], *, fixed: Collection[str] = ()
) -> dict[str, Sourced]:
    """Keep variables that are already set, even to the empty string, except `fixed` ones.

    An empty rank or endpoint counts as not set: no process can start without.
    """
    return {name: fact if name in fixed else _keep_users_value(name, fact, environ) for name, fact in made.items()}


def _keep_users_value(name: str, made: Sourced, environ: Mapping[str, str]) -> Sourced:
    """Return the user's value if there is one, with the value that it replaces in the rule."""
    users = environ.get(name)
    if users is None or (not users and name in {*RANKS, *ENDPOINT}):
        return made
    is_same = made.value in (None, users)
    rule = "already set in the environment, so not changed"
    return Sourced(
        value=users, source=USERS, rule=rule if is_same else f"{rule}; ddp-hpc would set {made.value!r} ({made.source})"
    )


def launched_worker_env(
    by: str, made: Mapping[str, Sourced], environ: Mapping[str, str], import_paths: Sequence[str] = ()
) -> WorkerEnv:
    """Return the table of a worker that our launcher starts. Its ranks, Slurm's too, and endpoint win over variables that are already set."""
    ranks = {name.lower(): int(made[name].value or 0) for name in RANKS}
    which = "rank {rank} of {world_size}, worker {local_rank} of {local_world_size} on node {node_rank}"
    slurms = task_variables(environ, **ranks)
    rule = "as srun sets it for one task a worker; Slurm's own is that of the process which starts this node's workers"
    tasks = {name: Sourced(value=value, source=OUR_SOURCE, rule=rule) for name, value in slurms.items()}
    # PyTorch then checks what ranks exchange: by the first variable with gloo, by the other with NCCL.
    nan = environ.get(NAN_CHECK)
    checks = dict.fromkeys(NAN_VARIABLES if nan else (), Sourced(value="1", source=OUR_SOURCE, rule=nan or ""))
    variables = keep_users_values({**made, **tasks, **checks}, environ, fixed={*RANKS, *ENDPOINT, *tasks})
    variables |= path_variables(import_paths, environ.get("PYTHONPATH"))
    return WorkerEnv(process=f"{which.format(**ranks)}, started by {by}", variables=variables)


NAN_CHECK = "_DDP_HPC_NAN_CHECK"
"""The variable by which a supervisor has its workers check gradients for NaN; it holds the reason."""
NAN_VARIABLES = ("TORCH_DIST_NAN_CHECK", "TORCH_NCCL_NAN_CHECK")


def nan_check_variables(rule: str) -> dict[str, str]:
    """Return what workers' launchers read to switch the check on, for this reason; nothing without one."""
    return {NAN_CHECK: rule} if rule else {}


def path_variables(paths: Sequence[str], python_path: str | None) -> dict[str, Sourced]:
    """Return PYTHONPATH with the user's code first, if the run has code of the user."""
    rule = "the user's code, then what was already set; a worker imports Python's own modules before it"
    return {"PYTHONPATH": Sourced(value=python_path, source=OUR_SOURCE, rule=rule)} if paths else {}


# --- facts -------------------------------------------------------------------------------------------------------------


def ranks_by_shape(*, node_rank: int, num_nodes: int, num_workers: int, local_rank: int) -> dict[str, Sourced]:
    """Return the ranks of a worker of a run with equally many workers on each node."""
    rows = (
        (node_rank * num_workers + local_rank, "ranks count the workers node by node"),
        (local_rank, "the worker's number on its node"),
        (num_nodes * num_workers, f"nodes: {num_nodes}, workers on each: {num_workers}"),
        (num_workers, "every node has this many workers"),
        (node_rank, "the node's number"),
    )
    return named_ranks((str(number), OUR_SOURCE, rule) for number, rule in rows)


def ranks_of_step(step: StepTask) -> dict[str, Sourced]:
    """Return the ranks of a task that srun started."""
    tasks = ", ".join(map(str, step.tasks_per_node))
    rows = (
        (step.rank, "Slurm (SLURM_PROCID)", _rank_rule(step)),
        (step.local_rank, "Slurm (SLURM_LOCALID)", "the task's number on its node"),
        (step.world_size, "Slurm (SLURM_STEP_TASKS_PER_NODE)", f"all tasks of the step: {tasks}"),
        (step.local_world_size, "Slurm (SLURM_STEP_TASKS_PER_NODE)", f"the tasks of this node; of all nodes: {tasks}"),
        (step.node_rank, "Slurm (SLURM_NODEID)", "the node's number in the step"),
    )
    return named_ranks((str(number), source, rule) for number, source, rule in rows)


def _rank_rule(step: StepTask) -> str:
    """Return why Slurm's rank counts if it is not the one of block distribution."""
    rule = "the task's number in the step"
    if step.rank == step.block_rank:
        return rule
    return f"{rule}; with `--distribution={step.distribution}` ranks of a node are not consecutive (`--distribution=block` would make it {step.block_rank})"


def ranks_of_shell(allocation: Allocation) -> dict[str, Sourced]:
    """Return the rank variables that hold for all tasks of a job, for a shell that exports them."""
    tasks = allocation.tasks_per_node
    listed, source = ", ".join(map(str, tasks)), "Slurm (SLURM_TASKS_PER_NODE)"
    is_even = len(set(tasks)) == 1
    by_task = (None, UNKNOWN_SOURCE, "each task of a step has its own; a shell has none")
    world = (
        str(sum(tasks)),
        source,
        f"all tasks of the job, by node: {listed}; correct only for a job step that has all of them",
    )
    local = (
        (str(tasks[0]), source, "every node has this many workers")
        if is_even
        else (None, UNKNOWN_SOURCE, f"the nodes have different numbers of tasks: {listed}")
    )
    return named_ranks((by_task, by_task, world, local, by_task))


def named_ranks(rows: Iterable[tuple[str | None, str, str]]) -> dict[str, Sourced]:
    """Return facts by the names of `RANKS`, from rows of value, source, rule."""
    return {
        name: Sourced(value=value, source=source, rule=rule)
        for name, (value, source, rule) in zip(RANKS, rows, strict=True)
    }


def torchrun_facts(environ: Mapping[str, str]) -> dict[str, Sourced]:
    """Return the ranks and the endpoint that torchrun set; torchrun's name for the node's number is GROUP_RANK.

    torchrun's agents meet at the endpoint that the supervisor chose. For the workers, torchrun opens another port there.
    """
    theirs = {name: "GROUP_RANK" if name == "NODE_RANK" else name for name in (*RANKS, *ENDPOINT)}
    rule = "torchrun set it"
    return {name: Sourced(value=environ[it], source=f"torchrun ({it})", rule=rule) for name, it in theirs.items()}


def torchrun_variables(
    environ: Mapping[str, str], *, attempt: int, max_restarts: int, run_id: str, error_file: str
) -> dict[str, str]:
    """Return what torchrun gives a worker besides ranks and endpoint, for scripts that are written for torchrun.

    https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
    """
    num_nodes = int(environ["WORLD_SIZE"]) // int(environ["LOCAL_WORLD_SIZE"])
    return {
        "GROUP_RANK": environ["NODE_RANK"],
        "GROUP_WORLD_SIZE": str(num_nodes),
        "ROLE_RANK": environ["RANK"],
        "ROLE_WORLD_SIZE": environ["WORLD_SIZE"],
        "ROLE_NAME": "default",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


ATTACH_VARIABLE = "_DDP_HPC_ATTACHED"
"""The variable by which `ddp_hpc.attach` in a user's script finds its run."""


def attach_variables(run: Path, *, attempt: int, stop_signal: str, stop_exit_code: int) -> dict[str, str]:
    """Return what `ddp_hpc.attach` reads: the run's directory, and how the script is asked to stop and says that it has."""
    facts = {"run": str(run), "attempt": attempt, "stop_signal": stop_signal, "stop_exit_code": stop_exit_code}
    return {ATTACH_VARIABLE: json.dumps(facts)}


SHARED_GPU = "_DDP_HPC_TEST_SHARED_GPU"
"""Test-only, set by `benchmarks/gpu_check.py`: all workers use the first GPU, over gloo, as NCCL refuses two ranks on one GPU."""

PROBE_FOLDER = "_DDP_HPC_PROBE_FOLDER"
"""The variable with the directory in which a rank opens the socket for questions to it (`rank_probe`)."""
PROBES_ITSELF = "_DDP_HPC_PROBES_ITSELF"
"""Set where no other process of the node asks the rank what it does before a watchdog ends it."""

CPUS_BEFORE = "_DDP_HPC_CPUS_BEFORE"
"""The variable with the CPUs that a rank's process had before it was kept to its own: `0,1,2,3`."""
_PRIVATE_VARIABLES = frozenset(
    {TABLE_VARIABLE, GIVEN_VARIABLE, USERS_CODE, NAN_CHECK, ATTACH_VARIABLE, PROBE_FOLDER, PROBES_ITSELF, CPUS_BEFORE}
)
"""What a rank of ours reads, and no run that is submitted from its script."""


def probe_variables(folder: Path | None, *, is_alone: bool = False) -> dict[str, str]:
    """Return what a rank reads to answer questions; nothing where this node has no directory for sockets."""
    if folder is None:
        return {}
    return {PROBE_FOLDER: str(folder), **({PROBES_ITSELF: "1"} if is_alone else {})}


_SUBSYSTEMS = {"info": "INIT,ENV,NET,P2P,SHM", "trace": "ALL"}
"""Value of `debug.nccl` -> the parts of NCCL that log; of `info`, those that say which network and transport they choose."""


def nccl_debug_variables(nccl: str, folder: Path) -> dict[str, str]:
    """Return what NCCL and torch.distributed read to log into a directory; nothing for `off`.

    https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug-file: `%h` is the host, `%p` the process.
    """
    if nccl not in _SUBSYSTEMS:
        return {}
    return {
        "NCCL_DEBUG": nccl.upper(),
        "NCCL_DEBUG_SUBSYS": _SUBSYSTEMS[nccl],
        "NCCL_DEBUG_FILE": str(folder / "%h-%p.log"),
        # Never DETAIL: it wraps each process group to compare all ranks' collectives, which is slow, and ended healthy ranks of gloo
        # by SIGSEGV (measured; https://docs.pytorch.org/docs/stable/distributed.html#debugging).
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "TORCH_CPP_LOG_LEVEL": "INFO",
    }


HOSTED_STORE_VARIABLES = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
"""Says to PyTorch that the store at MASTER_ADDR and MASTER_PORT is there already, so that rank zero does not host it."""


def endpoint(address: Sourced, port: Sourced) -> dict[str, Sourced]:
    """Return address and port of rank zero by their variables."""
    return dict(zip(ENDPOINT, (address, port), strict=True))


def endpoint_of_run(address: str, port: int, *, is_alone: bool = False) -> dict[str, Sourced]:
    """Return address and port of rank zero in a run; `is_alone`: the run has no other machine."""
    rule = "the run uses this machine only" if is_alone else "the line `ranks meet at` in the job's log says why"
    source = "agent" if is_alone else "supervisor"
    return endpoint(*(Sourced(value=str(value), source=source, rule=rule) for value in (address, port)))


def threads(num_cpus: int, num_workers: int = 1, cpus_per_worker: int | None = None, *, source: str) -> Sourced:
    """Return the number of threads for each worker of a node, whose workers may use `num_cpus` CPUs together."""
    each = cpus_per_worker or num_cpus // num_workers
    if not 0 < each * num_workers <= num_cpus:
        each = max(1, num_cpus) if num_workers == 1 else 1
    asked = "" if cpus_per_worker is None else f"; `resources.cpus_per_worker` is {cpus_per_worker}"
    return Sourced(value=str(each), source=source, rule=f"CPUs here: {num_cpus}, workers: {num_workers}{asked}")
