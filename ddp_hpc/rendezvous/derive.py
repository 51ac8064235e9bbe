"""Every variable that PyTorch and its libraries read of a job, each with where it comes from and why.

What the user has set wins, always. A task of a step knows all of them. A shell that speaks for the job (a batch script,
salloc's) knows what holds for every task, and no more, for what it exports reaches them all: no rank, and where nodes
may call their networks otherwise, no interface.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from ddp_hpc.rendezvous.address import Found, Host, find_address
from ddp_hpc.rendezvous.choice import Refused, is_routable
from ddp_hpc.rendezvous.interfaces import Interface
from ddp_hpc.rendezvous.ports import MOST_TRIES, candidate_ports
from ddp_hpc.slurm.allocation import Allocation, StepPlace

LOOPBACK = "127.0.0.1"
RESOLVER = "timeout:1 attempts:1"
"""PyTorch's store asks for the name of every peer, which takes ten seconds a process where reverse DNS is broken. One
try of one second is the least that resolv.conf(5) allows."""
USERS = "environment"
"""The source of what the user has set."""
NOBODY = "-"
"""The source of what is not known."""
_BY_TASK = "each task of a step has its own; in a shell nobody does"


@dataclass(frozen=True, kw_only=True)
class Derived:
    """One variable."""

    name: str
    value: str | None
    """Unset where it is not known."""
    source: str
    rule: str
    refused: tuple[Refused, ...] = ()

    @property
    def is_users(self) -> bool:
        """Whether the user has set it."""
        return self.source == USERS


@dataclass(frozen=True, kw_only=True)
class Derivation:
    """All variables, as this process should see them."""

    place: str
    """What this process is, in words."""
    variables: tuple[Derived, ...]

    def value(self, name: str) -> str | None:
        """Return one variable's value."""
        return next(one.value for one in self.variables if one.name == name)

    @property
    def to_export(self) -> dict[str, str]:
        """What is known, and not the user's already."""
        return {one.name: one.value for one in self.variables if one.value is not None and not one.is_users}


def derive(environ: Mapping[str, str], allocation: Allocation | None, host: Host) -> Derivation:
    """Return every variable, for a process with this environment on this host."""
    step = allocation.step if allocation else None
    address = _users(environ, "MASTER_ADDR") or _address(allocation, host)
    made = [
        *_ranks(allocation),
        address,
        _users(environ, "MASTER_PORT") or _port(address, allocation, host),
        *_interfaces(address, allocation, host),
        _threads(allocation, host),
        Derived(
            name="RES_OPTIONS", value=RESOLVER, source="ddp-hpc", rule="broken reverse DNS must not stall the start"
        ),
    ]
    variables = tuple(_with_users_word(one, environ) for one in made)
    return Derivation(place=_place(allocation, step), variables=variables)


def _users(environ: Mapping[str, str], name: str) -> Derived | None:
    value = environ.get(name)
    return Derived(name=name, value=value, source=USERS, rule="set already, and left alone") if value else None


def _with_users_word(made: Derived, environ: Mapping[str, str]) -> Derived:
    """Return the user's value, and what it would be else."""
    users = _users(environ, made.name)
    if users is None or made.is_users or made.value in (None, users.value):
        return users or made
    return replace(users, rule=f"{users.rule}; else it would be {made.value!r} ({made.source})")


def _place(allocation: Allocation | None, step: StepPlace | None) -> str:
    if allocation is None:
        return "outside of Slurm jobs: a world of one"
    if step is not None:
        where = f"on node {step.node_rank} of {step.num_nodes}"
        return f"task {step.rank} of {step.world_size} in step {allocation.job_id}.{step.step_id}, {where}"
    return f"{allocation.where} of job {allocation.job_id}: it speaks for all tasks"


def _ranks(allocation: Allocation | None) -> Iterator[Derived]:
    if allocation is None:
        yield from _ranks_alone()
    elif allocation.step is not None:
        yield from _ranks_in_step(allocation.step)
    else:
        yield from _ranks_in_shell(allocation)


_ALONE: Mapping[str, str] = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "NODE_RANK": "0",
}


def _ranks_alone() -> Iterator[Derived]:
    for name, value in _ALONE.items():
        yield Derived(name=name, value=value, source="ddp-hpc", rule="no job around: one process, alone")


def _ranks_in_step(step: StepPlace) -> Iterator[Derived]:
    tasks = ", ".join(map(str, step.tasks_per_node))
    rows = (
        ("RANK", step.rank, "Slurm (SLURM_PROCID)", _rank_rule(step)),
        ("LOCAL_RANK", step.local_rank, "Slurm (SLURM_LOCALID)", "the task's number on its node"),
        ("WORLD_SIZE", step.world_size, "Slurm (SLURM_STEP_TASKS_PER_NODE)", f"the step's tasks together: {tasks}"),
        (
            "LOCAL_WORLD_SIZE",
            step.local_world_size,
            "Slurm (SLURM_STEP_TASKS_PER_NODE)",
            f"the tasks of this node, of {tasks}",
        ),
        ("NODE_RANK", step.node_rank, "Slurm (SLURM_NODEID)", "the node's number in the step"),
    )
    for name, value, source, rule in rows:
        yield Derived(name=name, value=str(value), source=source, rule=rule)


def _rank_rule(step: StepPlace) -> str:
    """Say whose word it is where two differ."""
    rule = "the task's number in the step, by Slurm's own word"
    if step.rank == step.block_rank:
        return rule
    return (
        f"{rule}; with `--distribution={step.distribution}` ranks of a node are not consecutive "
        f"(`--distribution=block` would make it {step.block_rank})"
    )


def _ranks_in_shell(allocation: Allocation) -> Iterator[Derived]:
    tasks = allocation.tasks_per_node
    listed = ", ".join(map(str, tasks))
    even = str(tasks[0]) if len(set(tasks)) == 1 else None
    source = "Slurm (SLURM_TASKS_PER_NODE)"
    yield Derived(name="RANK", value=None, source=NOBODY, rule=_BY_TASK)
    yield Derived(name="LOCAL_RANK", value=None, source=NOBODY, rule=_BY_TASK)
    yield Derived(
        name="WORLD_SIZE",
        value=str(sum(tasks)),
        source=source,
        rule=f"the job's tasks together: {listed}; for a step of all of them",
    )
    yield Derived(
        name="LOCAL_WORLD_SIZE",
        value=even,
        source=source if even else NOBODY,
        rule="every node has as many" if even else f"nodes differ: {listed}",
    )
    yield Derived(name="NODE_RANK", value=None, source=NOBODY, rule=_BY_TASK)


def _address(allocation: Allocation | None, host: Host) -> Derived:
    if allocation is None:
        rule = "no job around: nobody else is to come"
        return Derived(name="MASTER_ADDR", value=LOOPBACK, source="ddp-hpc", rule=rule)
    found: Found = find_address(allocation, host)
    return Derived(name="MASTER_ADDR", value=found.address, source=found.source, rule=found.rule, refused=found.refused)


def _port(address: Derived, allocation: Allocation | None, host: Host) -> Derived:
    """Return the port; only the process that no other must agree with looks whether it is free."""
    step = allocation.step if allocation else None
    attempt = (allocation.restart_count if allocation else 0) + (step.step_id if step else 0)
    candidates = islice(candidate_ports(allocation.job_id if allocation else "0", attempt), MOST_TRIES)
    is_ours = allocation is None or (step is None and allocation.is_on_first_node)
    if not is_ours or address.value is None:
        rule = "made from job id, restart and step, so that all tasks come to the same; not tried"
        return Derived(name="MASTER_PORT", value=str(next(candidates)), source="ddp-hpc", rule=rule)
    taken: list[Refused] = []
    for port in candidates:
        if host.is_free(address.value, port):
            rule = "the first free one of the job's own, below the ephemeral ports"
            return Derived(name="MASTER_PORT", value=str(port), source="ddp-hpc", rule=rule, refused=tuple(taken))
        taken.append(Refused(str(port), "somebody listens there"))
    rule = f"{MOST_TRIES} ports are taken"
    return Derived(name="MASTER_PORT", value=None, source=NOBODY, rule=rule, refused=tuple(taken))


_FORMS: Mapping[str, Callable[[str], str]] = {
    "NCCL_SOCKET_IFNAME": "={}".format,
    "GLOO_SOCKET_IFNAME": "{}".format,
}
"""NCCL takes a name for the beginning of names unless `=` stands before it; gloo compares whole names, and would look
for one that begins with `=` (measured: PyTorch 2.13)."""


def _interfaces(address: Derived, allocation: Allocation | None, host: Host) -> Iterator[Derived]:
    is_shared = allocation is not None and allocation.step is None and allocation.node_names != (allocation.node_name,)
    interface = None if is_shared or address.value is None else _leads_to(address.value, host)
    for name, form in _FORMS.items():
        if interface is not None:
            source, rule = "kernel's routes", f"this node's name for the network that leads to {address.value}"
            yield Derived(name=name, value=form(interface.name), source=source, rule=rule)
        elif is_shared:
            rule = "names of networks differ from node to node: each task derives its own"
            yield Derived(name=name, value=None, source=NOBODY, rule=rule)
        else:
            rule = "no address of rank zero" if address.value is None else f"no route leads to {address.value}"
            yield Derived(name=name, value=None, source=NOBODY, rule=rule)


def _leads_to(address: str, host: Host) -> Interface | None:
    """Return this node's interface towards rank zero; the user may have named it by a name, which may mean 127.0.1.1."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        known = [text for text in host.resolve(address) if is_routable(ipaddress.ip_address(text.partition("%")[0]))]
        return host.leads_to(known[0]) if known else None
    return host.leads_to(address)


def _threads(allocation: Allocation | None, host: Host) -> Derived:
    """Return how many threads a process should compute with."""
    asked, rule = None, "the CPUs that this process may use"
    if allocation is not None:
        asked, rule = _cpus_of_task(allocation)
    if allocation is not None and asked is None:
        return Derived(name="OMP_NUM_THREADS", value=None, source=NOBODY, rule=rule)
    number = host.num_cpus if asked is None else asked
    if allocation is not None and allocation.where != "shell outside":
        number = max(1, min(number, host.num_cpus))
    source = "Slurm" if allocation else "this host"
    return Derived(name="OMP_NUM_THREADS", value=str(number), source=source, rule=rule)


def _cpus_of_task(allocation: Allocation) -> tuple[int | None, str]:
    step = allocation.step
    if allocation.cpus_per_task is not None:
        return allocation.cpus_per_task, "the CPUs of a task, as asked for with `--cpus-per-task`"
    if step is not None and allocation.cpus_on_node is not None:
        return allocation.cpus_on_node // step.local_world_size, "the step's CPUs on this node, shared by its tasks"
    return None, "nobody asked for `--cpus-per-task`: each task derives its own"
