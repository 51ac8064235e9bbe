"""Find rank zero's address where neither the user nor a launcher set it. Each process searches alone; all must agree.

The tasks of a plain `srun` share only Slurm's variables and the name service. Two other sources are not used, although all tasks of a step would read the same from them. The address of the host that
srun runs on may be a login node's, or loopback. The address in `scontrol show node` costs one request to the controller
for each task, and often is the node's name again.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.rendezvous.choice import (
    LOOPBACK,
    ONE_NODE,
    by_speed,
    choose_fabric,
    holder,
    is_routable,
    source_address,
)
from ddp_hpc.cluster.rendezvous.interfaces import Interface, local_interfaces
from ddp_hpc.cluster.rendezvous.ports import is_free
from ddp_hpc.cluster.rendezvous.worker_env import OURS, Fact
from ddp_hpc.cluster.slurm.allocation import Allocation

_MOST_NEIGHBOURS = 3
"""How many names rank zero's node tries to resolve: each may take ten seconds if the name service is broken."""


def addresses_of(name: str) -> list[str]:
    """Return the numeric addresses that this host's name service has for a name; empty if it knows none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


@dataclass(frozen=True, kw_only=True)
class Host:
    """What this host knows: interfaces, CPUs, names, routes and free ports."""

    interfaces: tuple[Interface, ...]
    num_cpus: int
    """CPUs that this process may use."""
    resolve: Callable[[str], Sequence[str]] = field(default=addresses_of)
    source_address: Callable[[str], str | None] = field(default=source_address)
    is_free: Callable[[str, int], bool] = field(default=is_free)

    def leads_to(self, address: str) -> Interface | None:
        """Return the interface through which the kernel sends to a numeric address."""
        return holder(self.source_address(address), self.interfaces)

    def address_of(self, name: str) -> str | None:
        """Return the address of another node's name on the fastest network that leads there; of equal ones, the lowest."""
        routes: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, Interface] = {}
        for ip in (ipaddress.ip_address(text.partition("%")[0]) for text in self.resolve(name)):
            route = self.leads_to(str(ip))
            if route is not None and is_routable(ip) and holder(str(ip), self.interfaces) is None:
                routes[ip] = route
        best = min(routes, key=lambda ip: (by_speed(routes[ip]), ipaddress.get_mixed_type_key(ip)), default=None)
        return None if best is None else str(best)

    def interface_towards(self, address: str) -> Fact:
        """Return the name of this node's interface on the route to rank zero."""
        interface = self.leads_to(address)
        if interface is None:
            return Fact(rule=f"this node has no route to {address}, so the libraries choose the interface")
        rule = f"the interface of this node on the route to {address}"
        return Fact(value=interface.name, source="routing table", rule=rule)


def this_host() -> Host:
    """Return the host that this process runs on."""
    return Host(interfaces=local_interfaces(), num_cpus=len(os.sched_getaffinity(0)))


def find_address(allocation: Allocation, host: Host) -> Fact:
    """Return the address at which this process should connect to rank zero."""
    step = allocation.step
    nodes = step.node_names if step else allocation.node_names
    zero = step.rank_zero_node if step else nodes[0]
    here = nodes[step.node_rank] if step else allocation.node_name
    if zero is None:
        return Fact(
            rule="a hostfile (`--distribution=arbitrary`) may put rank zero on any node: set MASTER_ADDR yourself"
        )
    others = [node for node in nodes if node != zero]
    if not others:
        return Fact(value=LOOPBACK, source=OURS, rule=ONE_NODE)
    # A shell (batch script, salloc) passes its answer on to all tasks with `export`, so it may take the fastest network.
    if here == zero and step is None:
        return _fastest([zero, *others], host)
    # Rank zero's node must not resolve its own name: on Debian, /etc/hosts maps it to 127.0.1.1
    # (https://www.debian.org/doc/manuals/debian-reference/ch05.en.html). So it resolves another node's name, and takes the
    # local address from which the kernel would send to that node. If all names of nodes belong to one network, as Slurm
    # needs it, this is the address that the others found. If it is not, it is still an address of rank zero's node, and the
    # store of rank zero listens on all addresses.
    asked = others[:_MOST_NEIGHBOURS] if here == zero else [zero]
    for name in asked:
        address = host.address_of(name)
        if address is None:
            continue
        if here == zero:
            address = host.source_address(address)
            rule = f"{name} reaches this node at this address; this node's own name is not used, as it may mean 127.0.1.1 on this node itself"
            return Fact(value=address, source="routing table", rule=rule)
        rule = f"{zero} resolves to this address on this host; other nodes look {zero} up too, and {zero} itself uses its routing table"
        return Fact(value=address, source="name service", rule=rule)
    return Fact(
        rule=f"this host cannot resolve {', '.join(asked)} to an address that it can reach: set MASTER_ADDR with `export` in the job script"
    )


def _fastest(nodes: Sequence[str], host: Host) -> Fact:
    """Return the address of the fastest network of this host, which is the first of these nodes."""
    try:
        choice = choose_fabric({nodes[0]: host.interfaces}, nodes)
    except ConfigError as error:
        return Fact(rule=str(error))
    source = f"this node's {choice.interface}"
    return Fact(value=choice.address, source=source, rule=choice.rule, refused=choice.refused)
