"""Find the place of a process that another program than ddp-hpc has started: a table of launchers and their variables. Pure.

A launcher starts either one process for each worker, or one for each node. Each row names the variables by which its
processes are recognised, and those that hold a rank, a size or an address. The first row that fits counts: what has started
this process itself stands above what has started that.
"""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.rendezvous.address import Host, address_for_task
from ddp_hpc.cluster.rendezvous.choose_network import LOOPBACK_ADDRESS, usable_addresses, usable_interfaces
from ddp_hpc.cluster.rendezvous.ports import LOWEST_PORT, candidate_ports
from ddp_hpc.cluster.rendezvous.worker_env import (
    OUR_SOURCE,
    RANKS,
    Sourced,
    WorkerEnv,
    endpoint,
    launched_worker_env,
    named_ranks,
    node_variables,
    threads,
)
from ddp_hpc.cluster.slurm.allocation import Allocation

Scope = Literal["worker", "node"]
"""Whether a launcher starts one process for each worker, or one for each node."""
_RESTARTS_KEY = "TORCHELASTIC_RESTART_COUNT"
_COMPUTED = "computed from the other ranks"
_LOWEST_EPHEMERAL = 32_768
"""Of Linux by default. Nodes may have set another, and all of them have to compute the same ports."""


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A row of the table. A field without a variable's name is one that the launcher does not set."""

    name: str
    marks: tuple[str, ...]
    """Variables that all have to be set, and not to be empty."""
    rank: str = ""
    local_rank: str = ""
    world_size: str = ""
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""
    address: str = "MASTER_ADDR"
    """The variable with rank zero's address, or with the addresses of all nodes, that of the first one first."""
    port: str = "MASTER_PORT"
    job: str = ""
    """The variable that differs from job to job, for the choice of a port."""


TORCHRUN = Launcher(
    name="torchrun",
    marks=("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    rank="RANK",
    local_rank="LOCAL_RANK",
    world_size="WORLD_SIZE",
    local_world_size="LOCAL_WORLD_SIZE",
)
SRUN = Launcher(name="srun", marks=())
"""Recognised, and read, by `slurm.allocation`."""
LAUNCHERS: tuple[Launcher, ...] = (
    TORCHRUN,
    Launcher(
        name="mpirun (Open MPI)",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        rank="OMPI_COMM_WORLD_RANK",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PBS_JOBID",
    ),
    Launcher(
        name="mpiexec (PALS)",
        marks=("PALS_RANKID", "PALS_LOCAL_RANKID", "PMI_SIZE"),
        rank="PALS_RANKID",
        local_rank="PALS_LOCAL_RANKID",
        world_size="PMI_SIZE",
        local_world_size="PALS_LOCAL_SIZE",
        job="PBS_JOBID",
    ),
    Launcher(
        name="mpiexec (MPICH, Intel MPI)",
        marks=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        rank="PMI_RANK",
        local_rank="MPI_LOCALRANKID",
        world_size="PMI_SIZE",
        local_world_size="MPI_LOCALNRANKS",
        job="PBS_JOBID",
    ),
    Launcher(
        name="flux run",
        marks=("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_SIZE", "FLUX_JOB_NNODES"),
        rank="FLUX_TASK_RANK",
        local_rank="FLUX_TASK_LOCAL_ID",
        world_size="FLUX_JOB_SIZE",
        num_nodes="FLUX_JOB_NNODES",
        job="FLUX_JOB_ID",
    ),
    SRUN,
    Launcher(
        name="Kubeflow, or torchrun's own variables",
        marks=("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        node_rank="PET_NODE_RANK",
        num_nodes="PET_NNODES",
        local_world_size="PET_NPROC_PER_NODE",
        address="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
    ),
    Launcher(
        name="SkyPilot",
        marks=("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
        node_rank="SKYPILOT_NODE_RANK",
        num_nodes="SKYPILOT_NUM_NODES",
        local_world_size="SKYPILOT_NUM_GPUS_PER_NODE",
        address="SKYPILOT_NODE_IPS",
        job="SKYPILOT_TASK_ID",
    ),
    replace(TORCHRUN, name="PyTorch's variables, set by hand", marks=TORCHRUN.marks[1:]),
)
"""In the order in which they are tried."""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a process belongs, by what its launcher says."""

    launcher: str
    scope: Scope
    recognised_by: tuple[str, ...]
    """The variables of the row."""
    node_rank: int
    num_nodes: int
    address: Sourced
    """Of rank zero's node, as the launcher names it."""
    port: Sourced
    rank: int = 0
    """This process's; of a node: that of its first worker, where the number of workers is known."""
    local_rank: int = 0
    local_world_size: int | None = None
    """None where the launcher does not say how many workers a node has."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """A worker's number, by PyTorch's name in small letters -> the launcher's variable that it comes from."""
    is_store_hosted: bool = False
    """Whether the launcher serves a store at the address and port."""
    restart: int = 0
    """How often the launcher has restarted its workers."""

    @property
    def world_size(self) -> int:
        """Workers on all nodes."""
        return self.num_nodes * (self.local_world_size or 1)

    @property
    def description(self) -> str:
        """Say what this process is, and how that is known."""
        by = f"{self.launcher} (recognised by {', '.join(self.recognised_by)})"
        if self.scope == "node":
            return f"the process of node {self.node_rank} of {self.num_nodes}, started by {by}: this process starts the workers of its node"
        on = f"worker {self.local_rank} of {self.local_world_size} on node {self.node_rank}"
        return f"rank {self.rank} of {self.world_size}, {on}, started by {by}"


def find_place(
    environ: Mapping[str, str], allocation: Allocation | None, host: Host, *, first_node: str | None = None
) -> RankPlace | None:
    """Return the place of this process; None where no launcher of the table has started it.

    `first_node` is the first line of the file that PBS_NODEFILE names, where this host has that file.
    """
    row = recognise(environ, allocation)
    if row is None:
        return None
    if allocation is not None and row is SRUN:
        return _read_srun(environ, allocation, host)
    return (_read_worker if row.rank else _read_node)(row, environ, first_node)


def recognise(environ: Mapping[str, str], allocation: Allocation | None) -> Launcher | None:
    """Return the launcher that has started this process; None where the table has it not."""
    is_task = allocation is not None and allocation.step is not None
    set_here = {name for name, value in environ.items() if value.strip()}
    return next((row for row in LAUNCHERS if (is_task if row is SRUN else set_here.issuperset(row.marks))), None)


def _read_srun(environ: Mapping[str, str], allocation: Allocation, host: Host) -> RankPlace:
    step = allocation.step
    assert step is not None  # noqa: S101  by it, srun was recognised
    if len({*step.tasks_per_node}) > 1:
        _refuse_uneven("srun")
    local_world_size = step.local_world_size
    _require_block("srun", step.rank, step.local_rank, local_world_size)
    return RankPlace(
        launcher=SRUN.name,
        scope="worker",
        recognised_by=("Slurm's variables of a job step",),
        rank=step.rank,
        local_rank=step.local_rank,
        local_world_size=local_world_size,
        node_rank=step.node_rank,
        num_nodes=step.num_nodes,
        address=address_for_task(environ, allocation, host),
        port=_port(environ, "MASTER_PORT", f"{allocation.job_id}", allocation.restart_count + step.step_id),
        sources=dict.fromkeys(("rank", "local_rank", "world_size", "local_world_size"), "Slurm"),
    )


def _read_worker(row: Launcher, environ: Mapping[str, str], first_node: str | None) -> RankPlace:
    """Return the place of a process that is one worker."""
    rank, local_rank = _number(environ, row.rank), _number(environ, row.local_rank)
    world_size = _number(environ, row.world_size)
    sources = {"rank": row.rank, "local_rank": row.local_rank, "world_size": row.world_size}
    if row.local_world_size and environ.get(row.local_world_size):
        local_world_size = _number(environ, row.local_world_size)
        sources["local_world_size"] = row.local_world_size
    elif row.num_nodes:
        num_nodes = max(1, _number(environ, row.num_nodes))
        if world_size % num_nodes:
            _refuse_uneven(row.name)
        local_world_size = world_size // num_nodes
        sources["local_world_size"] = row.num_nodes
    else:
        raise ConfigError(
            f"{row.name} has started this process ({row.rank} is set), but {row.local_world_size} is not set, so the number of "
            f"processes on this node is not known. Set {row.local_world_size} for every process."
        )
    if local_world_size < 1 or world_size % local_world_size or not 0 <= rank < world_size:
        _refuse_uneven(row.name)
    _require_block(row.name, rank, local_rank, local_world_size)
    is_torchrun = row is TORCHRUN
    return RankPlace(
        launcher=row.name,
        scope="worker",
        recognised_by=row.marks,
        rank=rank,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        num_nodes=world_size // local_world_size,
        address=_address(row, environ, first_node, is_alone=world_size == local_world_size),
        port=_port(environ, row.port, environ.get(row.job, "")),
        sources=sources,
        is_store_hosted=is_torchrun and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart=_parse_number(_RESTARTS_KEY, environ.get(_RESTARTS_KEY) or "0") if is_torchrun else 0,
    )


def _read_node(row: Launcher, environ: Mapping[str, str], first_node: str | None) -> RankPlace:
    """Return the place of a process that is to start the workers of its node."""
    addresses = environ[row.address].split()
    num_nodes = _num_nodes(row, environ, len(addresses))
    node_rank = _number(environ, row.node_rank)
    if not 0 <= node_rank < num_nodes:
        raise ConfigError(
            f"{row.node_rank} is {node_rank}, but the job has {num_nodes} nodes, so it must be between 0 and {num_nodes - 1}. Correct "
            "the variable, or the number of nodes."
        )
    workers = environ.get(row.local_world_size, "").strip() if row.local_world_size else ""
    known = int(workers) if workers.isdecimal() and int(workers) > 0 else None  # `auto`, `gpu` and 0 GPUs say nothing
    return RankPlace(
        launcher=row.name,
        scope="node",
        recognised_by=row.marks,
        node_rank=node_rank,
        num_nodes=num_nodes,
        local_world_size=known,
        rank=node_rank * (known or 1),
        address=_address(row, environ, first_node, is_alone=num_nodes == 1),
        port=_port(environ, row.port, environ.get(row.job, "")),
        sources={"node_rank": row.node_rank, **({"local_world_size": row.local_world_size} if known else {})},
    )


def _num_nodes(row: Launcher, environ: Mapping[str, str], num_addresses: int) -> int:
    text = environ.get(row.num_nodes, "").strip()
    if not text:
        return num_addresses
    least, _, most = text.partition(":")
    if most and most != least:
        raise ConfigError(
            f"{row.num_nodes} is {text!r}, a number of nodes that may change, but a run of ddp-hpc has a fixed one while its workers "
            f"run. Set {row.num_nodes}={least}, or start the run with `torchrun -m ddp_hpc join`."
        )
    return _parse_number(row.num_nodes, least)


def _address(row: Launcher, environ: Mapping[str, str], first_node: str | None, *, is_alone: bool) -> Sourced:
    """Return the address of rank zero's node: the launcher's, the user's, or the first node of PBS."""
    text = environ.get(row.address, "").split()
    if text:
        rule = "the address of the first node" if len(text) > 1 else f"{row.name} or the user set it"
        return Sourced(value=text[0], source=row.address, rule=rule)
    if is_alone:
        return Sourced(value=LOOPBACK_ADDRESS, source=OUR_SOURCE, rule="the run has one node only")
    if first_node:
        return Sourced(value=first_node, source="PBS_NODEFILE", rule="the first node of the job")
    raise ConfigError(
        f"{row.name} has started this process, but it does not say which node has rank zero. Set MASTER_ADDR to the address of the "
        "first node for all processes of the job."
    )


def _port(environ: Mapping[str, str], name: str, job: str, attempt: int = 0) -> Sourced:
    """Return the port: the launcher's or the user's, or else one that all processes of the job compute."""
    given = environ.get(name, "").strip()
    if given:
        port = _parse_number(name, given)
        if not 0 < port < 2**16:
            raise ConfigError(f"{name} is {given!r}, but a port is between 1 and 65535. Set another one.")
        return Sourced(value=given, source=name, rule="already set")
    number = re.match(r"\d+", job)
    seed = number[0] if number else str(zlib.crc32(job.encode()))
    first = next(candidate_ports(seed, attempt, low=_LOWEST_EPHEMERAL))
    return Sourced(
        value=str(first),
        source=OUR_SOURCE,
        rule="computed from the job's id, and by `ddp-hpc join` from the run's path, too, so that all processes get the same; set "
        "MASTER_PORT for another",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    return _parse_number(name, environ.get(name, ""))


def _parse_number(name: str, text: str) -> int:
    text = text.strip()
    if not (text.isdecimal() and text.isascii()):
        raise ConfigError(
            f"{name} is {text!r}, but it must be a number. Do not change the variables that a launcher sets."
        )
    return int(text)


def _refuse_uneven(launcher: str) -> None:
    raise ConfigError(
        f"{launcher} has started different numbers of processes on the nodes, but a run has the same number of workers on each node. "
        "Ask for the same number on each."
    )


def _require_block(launcher: str, rank: int, local_rank: int, local_world_size: int) -> None:
    """Refuse ranks that do not fill one node after the other."""
    if rank % local_world_size != local_rank:
        raise ConfigError(
            f"{launcher} has given this process rank {rank} and the number {local_rank} on its node, where {local_world_size} processes "
            "run, so the ranks do not fill one node after the other. Start them by blocks (srun: `--distribution=block`; Open MPI: "
            "`--map-by ppr:N:node --rank-by slot`)."
        )


# --- variables ---------------------------------------------------------------------------------------------------------


def with_workers(place: RankPlace, num_workers: int) -> RankPlace:
    """Return the place with the number of workers that the run's configuration asks for, where the launcher says none."""
    known = place.local_world_size or num_workers
    return replace(
        place, local_world_size=known, rank=place.rank if place.scope == "worker" else place.node_rank * known
    )


def with_port_of_run(place: RankPlace, run: Path) -> RankPlace:
    """Return the place with the run's own port, where nobody has named one: a job may have several runs, and some have no job.

    `run` is the run's absolute path: all processes of the run have the same.
    """
    if place.port.source != OUR_SOURCE:
        return place
    num_ports = _LOWEST_EPHEMERAL - LOWEST_PORT
    port = LOWEST_PORT + (int(place.port.value or 0) - LOWEST_PORT + zlib.crc32(bytes(run))) % num_ports
    return replace(place, port=replace(place.port, value=str(port)))


def numeric_address(place: RankPlace, host: Host) -> str:
    """Return rank zero's address as a number."""
    name = place.address.value
    if name is None:
        raise ConfigError(f"The address of rank zero's node is not known: {place.address.rule.rstrip('.')}.")
    # To torchrun's store, torchrun itself has connected by the name. Debian's /etc/hosts has 127.0.1.1 for a node's own name.
    may_be_loopback = place.num_nodes == 1 or place.node_rank == 0 or place.is_store_hosted or name == "localhost"
    address = host.numeric_address(name, may_be_loopback=may_be_loopback)
    if address is None:
        raise ConfigError(
            f"This host cannot resolve {name!r} ({place.address.source}), the node of rank zero, to an address that it can reach. "
            "Set MASTER_ADDR to an IP address of that node."
        )
    return address


def worker_env_of(
    place: RankPlace, environ: Mapping[str, str], host: Host, cpu_threads: Sourced | None = None
) -> WorkerEnv:
    """Return every variable of this worker, or of the first worker of this node."""
    address = numeric_address(place, host)
    local_world_size, said = place.local_world_size or 1, f"{place.launcher} set it"
    numbers = (place.rank, place.local_rank, place.world_size, local_world_size, place.rank // local_world_size)
    rows = (
        (str(number), place.sources.get(name.lower(), OUR_SOURCE), said if name.lower() in place.sources else _COMPUTED)
        for name, number in zip(RANKS, numbers, strict=True)
    )
    computing = cpu_threads or threads(host.num_cpus, local_world_size, source="this host")
    towards = address
    if (
        place.num_nodes > 1 and ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ):  # gloo would offer others this one
        towards = next((str(usable_addresses(nic)[0]) for nic in usable_interfaces(host.interfaces)), address)
    made = {
        **named_ranks(rows),
        **endpoint(replace(place.address, value=address), place.port),
        **node_variables(host.interface_towards(towards), computing),
    }
    return replace(launched_worker_env(place.launcher, made, environ), process=place.description)
