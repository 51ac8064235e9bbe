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

from ddp_hpc.errors import ConfigError
from ddp_hpc.rendezvous.choice import (
    Refused,
    by_speed,
    choose_fabric,
    fabric,
    holder,
    is_routable,
    source_address,
)
from ddp_hpc.rendezvous.interfaces import Interface, local_interfaces
from ddp_hpc.rendezvous.ports import is_free
from ddp_hpc.rendezvous.worker_env import Fact
from ddp_hpc.slurm.allocation import Allocation

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
    if here != zero:
        return _by_name(zero, host)
    # A shell (batch script, salloc) passes its answer on to all tasks with `export`, so it may take the fastest network.
    if step is None or len(nodes) == 1:
        return _fastest(zero, nodes, host)
    # Rank zero's node must not resolve its own name: on Debian, /etc/hosts maps it to 127.0.1.1
    # (https://www.debian.org/doc/manuals/debian-reference/ch05.en.html). So it resolves another node's name, and takes the
    # local address from which the kernel would send to that node. If all names of nodes belong to one network, as Slurm
    # needs it, this is the address that the others found. If it is not, it is still an address of rank zero's node, and the
    # store of rank zero listens on all addresses.
    return _towards_others([node for node in nodes if node != zero], host)


def _fastest(zero: str, nodes: Sequence[str], host: Host) -> Fact:
    """Return the address of this node's fastest network."""
    try:
        choice = choose_fabric({zero: host.interfaces}, [zero, *(node for node in nodes if node != zero)])
    except ConfigError as error:
        return Fact(rule=str(error))
    return Fact(
        value=choice.address,
        source=f"this node's {choice.interface}",
        rule=choice.rule,
        refused=choice.refused,
    )


def _by_name(zero: str, host: Host) -> Fact:
    """Return the address to which the name of rank zero's node resolves on this host."""
    best, refused = _best(host.resolve(zero), host)
    if best is None:
        return Fact(
            rule=f"this host cannot resolve {zero} to an address that it can reach: set MASTER_ADDR with `export` in the job script",
            refused=refused,
        )
    rule = f"{zero} resolves to this address on this host; other nodes look {zero} up too, and {zero} itself uses its routing table"
    return Fact(value=best, source="name service", rule=rule, refused=refused)


def _towards_others(neighbours: Sequence[str], host: Host) -> Fact:
    """Return the address under which other nodes can reach this node, which runs rank zero."""
    for neighbour in neighbours[:_MOST_NEIGHBOURS]:
        theirs, refused = _best(host.resolve(neighbour), host)
        own = None if theirs is None else host.source_address(theirs)
        interface = holder(own, host.interfaces)
        if own is not None and interface is not None:
            rule = (
                f"{neighbour} reaches this node at this address; this node's own name is not used here, because it may mean "
                "127.0.1.1 on this node itself"
            )
            return Fact(value=own, source=f"this node's {interface.name}", rule=rule, refused=refused)
    asked = ", ".join(neighbours[:_MOST_NEIGHBOURS])
    return Fact(
        rule=f"this node cannot resolve {asked} to an address that it can reach: set MASTER_ADDR with `export` in the job script"
    )


def _best(addresses: Sequence[str], host: Host) -> tuple[str | None, tuple[Refused, ...]]:
    """Return the address on the fastest network among those of another node, and why the others are refused."""
    refused = {text: why for text in addresses if (why := _address_refusal(text, host)) is not None}
    routes = {text: route for text in addresses if text not in refused and (route := host.leads_to(text)) is not None}
    by_number = {text: ipaddress.get_mixed_type_key(ipaddress.ip_address(text)) for text in routes}
    ranked = sorted(routes, key=lambda text: (by_speed(routes[text]), by_number[text]))
    refused |= {text: f"slower: {fabric(routes[text])}" for text in ranked[1:]}
    return (ranked[0] if ranked else None), tuple(Refused(text, why) for text, why in refused.items())


def _address_refusal(text: str, host: Host) -> str | None:
    """Return why an address cannot be that of another node which this host can reach; None if it can."""
    if not is_routable(ipaddress.ip_address(text.partition("%")[0])):
        return "loopback or link-local: other nodes cannot reach it"
    if holder(text, host.interfaces) is not None:
        return "an address of this host itself"
    return "this host has no route to it" if host.leads_to(text) is None else None
