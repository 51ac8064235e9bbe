"""Interfaces and jobs for tests, as the lab's nodes have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_hpc.cluster.rendezvous.address import Host
from ddp_hpc.cluster.rendezvous.interfaces import Interface

LO = Interface(name="lo", kind="loopback", is_up=True, addresses=("127.0.0.1/8", "::1/128"))
DOCKER = Interface(name="docker0", kind="virtual bridge", is_up=True, addresses=("172.17.0.1/16",))


def interface(name: str, *addresses: str, **facts: Any) -> Interface:
    """Return an Ethernet interface that is up, unless said otherwise."""
    return Interface(**{"name": name, "kind": "ethernet", "is_up": True, "addresses": addresses, **facts})


def node(number: int, *, eth: str = "eth0", ib: str = "ib0") -> tuple[Interface, ...]:
    """Return what node 1, 2, .. has: a slow network, a fast one, and what comes with Docker."""
    return (
        DOCKER,
        interface(eth, f"10.77.0.{10 + number}/24", f"fe80::{number}/64", speed_mbps=1000),
        interface(ib, f"10.78.0.{10 + number}/24", speed_mbps=10000),
        LO,
    )


def host(
    interfaces: Sequence[Interface],
    *,
    names: Mapping[str, Sequence[str]] | None = None,
    routes: Mapping[str, str] | None = None,
    taken: Sequence[int] = (),
    num_cpus: int = 16,
) -> Host:
    """Return a host that resolves these names, sends to these addresses from those, and has these ports taken.

    An address of its own is reached from itself, as the kernel does.
    """
    own = {str(ip): str(ip) for one in interfaces for ip in one.ips}
    known, ways = dict(names or {}), {**own, **(routes or {})}
    return Host(
        interfaces=tuple(interfaces),
        num_cpus=num_cpus,
        resolve=lambda name: known.get(name, ()),
        source_address=ways.get,
        is_free=lambda address, port: port not in taken,
    )


def shell(nodes: str = "node[1-3]", tasks: str = "4,1(x2)", **more: str) -> dict[str, str]:
    """Return the variables of salloc's shell on a login node (measured: 22.05)."""
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks, **more}


def batch(nodes: str = "node[1-3]", tasks: str = "4,1(x2)", *, on: str = "node1", **more: str) -> dict[str, str]:
    """Return the variables of a batch script: it is number 0 of everything too."""
    zeros = {"SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURM_CPUS_ON_NODE": "4"}
    return {**shell(nodes, tasks), **zeros, "SLURMD_NODENAME": on, **more}


def task(
    rank: int,
    node_rank: int,
    local_rank: int,
    *,
    on: str,
    nodes: str = "node[1-3]",
    tasks: str = "4,1(x2)",
    **more: str,
) -> dict[str, str]:
    """Return the variables of a task that srun has started from a batch script."""
    return {
        **batch(on=on),
        "SLURM_TASKS_PER_NODE": tasks,
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node_rank),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NUM_TASKS": "6",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.11",
        **more,
    }
