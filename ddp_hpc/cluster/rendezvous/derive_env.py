"""Find the worker variables of a process that none of our launchers started, for `ddp-hpc env`.

Variables that the user set always win. A task of a step knows all of its variables. A shell (batch script, salloc) knows
only what holds for every task, since all tasks get what it exports: so no rank, and no interface if the job has other
nodes, where the name may differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from ddp_hpc.cluster.rendezvous.address import Host, address_for_task
from ddp_hpc.cluster.rendezvous.ports import MOST_TRIES, candidate_ports
from ddp_hpc.cluster.rendezvous.worker_env import (
    COMPILER_CACHE,
    OUR_SOURCE,
    Sourced,
    WorkerEnv,
    endpoint,
    keep_users_values,
    node_variables,
    ranks_by_shape,
    ranks_of_shell,
    ranks_of_step,
    threads,
)
from ddp_hpc.cluster.slurm.allocation import Allocation, granted_cpus


def derive(environ: Mapping[str, str], allocation: Allocation | None, host: Host) -> WorkerEnv:
    """Return every variable, for a process with this environment on this host."""
    address, step = address_for_task(environ, allocation, host), allocation.step if allocation else None
    if allocation is None:
        process = "no Slurm job: a single process"
        ranks = ranks_by_shape(node_rank=0, num_nodes=1, num_workers=1, local_rank=0)
        computing = threads(host.num_cpus, source="this host")
    elif step is not None:
        where = f"on node {step.node_rank} of {step.num_nodes}"
        process = f"task {step.rank} of {step.world_size} in step {allocation.job_id}.{step.step_id}, {where}"
        ranks, granted = ranks_of_step(step), granted_cpus(environ)
        computing = threads(min(host.num_cpus, granted[0]) if granted else host.num_cpus, source="Slurm")
    else:
        where = "a node" if allocation.process_kind == "shell on a node" else "a host that is not in the job"
        process = f"shell of job {allocation.job_id}, on {where}: every task inherits what this shell exports"
        ranks, computing = ranks_of_shell(allocation), _threads_of_shell(allocation, host)
    made = {
        **ranks,
        **endpoint(address, _port(address, allocation, host)),
        **node_variables(_interface(address, allocation, host), computing),
    }
    if allocation is not None and step is None:
        made[COMPILER_CACHE] = Sourced(rule="each node has a directory of its own: each task finds it")
    return WorkerEnv(process=process, variables=keep_users_values(made, environ))


def _port(address: Sourced, allocation: Allocation | None, host: Host) -> Sourced:
    """Return the port. Only a process whose choice all others get checks whether the port is free."""
    step = allocation.step if allocation else None
    attempt = (allocation.restart_count if allocation else 0) + (step.step_id if step else 0)
    candidates = islice(candidate_ports(allocation.job_id if allocation else "0", attempt), MOST_TRIES)
    is_ours = allocation is None or (step is None and allocation.is_on_first_node)
    if not is_ours or address.value is None:
        rule = "computed from job id, restart count and step id, so that all tasks get the same; not checked whether it is free"
        return Sourced(value=str(next(candidates)), source=OUR_SOURCE, rule=rule)
    taken: dict[str, str] = {}
    for port in candidates:
        if host.is_free(address.value, port):
            rule = "the first free port of those computed from the job id, below the ephemeral ports"
            return Sourced(value=str(port), source=OUR_SOURCE, rule=rule, refused=taken)
        taken[str(port)] = "another process uses it"
    return Sourced(
        rule=f"other processes use all {MOST_TRIES} ports that ddp-hpc tried: set MASTER_PORT to a free one",
        refused=taken,
    )


def _interface(address: Sourced, allocation: Allocation | None, host: Host) -> Sourced:
    if allocation is not None and allocation.step is None and allocation.node_names != (allocation.node_name,):
        return Sourced(rule="interface names may differ between nodes: each task finds its own")
    if address.value is None:
        return Sourced(rule="rank zero's address is not known; see MASTER_ADDR")
    numeric = host.numeric_address(address.value, may_be_loopback=False)
    if numeric is None:
        return Sourced(rule=f"this host cannot resolve {address.value} to an address: set MASTER_ADDR to a numeric one")
    return host.interface_towards(numeric)


def _threads_of_shell(allocation: Allocation, host: Host) -> Sourced:
    """Return the number of threads that each task of a shell's job should compute with."""
    if allocation.cpus_per_task is None:
        return Sourced(rule="the job was submitted without `--cpus-per-task`, so each task counts its own CPUs")
    is_here = allocation.process_kind == "shell on a node"
    num_cpus = min(allocation.cpus_per_task, host.num_cpus) if is_here else allocation.cpus_per_task
    return threads(num_cpus, source="Slurm")
