"""Rank zero's address, where nobody has said it: found by each process alone, so that all come to the same one.

A shell that speaks for the whole job hands its answer on by `export`, so it may take the fastest network it sees. The
tasks of a plain `srun` have nothing in common but Slurm's variables and the name service: there, every other node asks
for the address of rank zero's name. Rank zero's node must not ask for its own name: Debian's installer makes it mean
127.0.1.1 there. It asks for another node's, and takes the address that the kernel sends from on the way to it: where
the names of nodes belong to one network, as Slurm itself needs it, that is the one the others were told. Should they
differ all the same, both are addresses of rank zero's node, and its store listens on all of them.

Not used, though every task of a step is told the same: the address of the host that srun runs on, which may be a login
node, or loopback on that host itself; and the node's address in `scontrol show node`, which is a question to the
controller for each task, and often the name again.
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
"""How many names to ask for before rank zero's node gives up: each may take the name service ten seconds."""


def addresses_of(name: str) -> list[str]:
    """Return the numeric addresses that this host's name service has for a name; none where it knows none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(place[0]) for *_, place in found))


@dataclass(frozen=True, kw_only=True)
class Host:
    """This host, and the questions one may ask it."""

    interfaces: tuple[Interface, ...]
    num_cpus: int
    """That this process may use."""
    resolve: Callable[[str], Sequence[str]] = field(default=addresses_of)
    source_address: Callable[[str], str | None] = field(default=source_address)
    is_free: Callable[[str, int], bool] = field(default=is_free)

    def leads_to(self, address: str) -> Interface | None:
        """Return the interface that the kernel sends by to a numeric address."""
        return holder(self.source_address(address), self.interfaces)

    def interface_towards(self, address: str) -> Fact:
        """Return this node's name for the network that leads to rank zero."""
        interface = self.leads_to(address)
        if interface is None:
            return Fact(rule=f"no route leads to {address}")
        rule = f"this node's name for the network that leads to {address}"
        return Fact(value=interface.name, source="kernel's routes", rule=rule)


def this_host() -> Host:
    """Return the host this process runs on."""
    return Host(interfaces=local_interfaces(), num_cpus=len(os.sched_getaffinity(0)))


def find_address(allocation: Allocation, host: Host) -> Fact:
    """Return where this process should look for rank zero."""
    step = allocation.step
    nodes = step.node_names if step else allocation.node_names
    zero = step.rank_zero_node if step else nodes[0]
    here = nodes[step.node_rank] if step else allocation.node_name
    if zero is None:
        return Fact(rule="a hostfile (`--distribution=arbitrary`) may have put rank zero on any node: set it yourself")
    if here != zero:
        return _by_name(zero, host)
    if step is None or len(nodes) == 1:
        return _fastest(zero, nodes, host)
    return _towards_others([node for node in nodes if node != zero], host)


def _fastest(zero: str, nodes: Sequence[str], host: Host) -> Fact:
    """Take this node's best network."""
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
    """Take what rank zero's name means here."""
    best, refused = _best(host.resolve(zero), host)
    if best is None:
        return Fact(rule=f"no address of {zero} is known here: export MASTER_ADDR in the job script", refused=refused)
    rule = f"what {zero} resolves to on this host; every node but {zero} asks the same, and it finds its own by route"
    return Fact(value=best, source="name service", rule=rule, refused=refused)


def _towards_others(neighbours: Sequence[str], host: Host) -> Fact:
    """Take the address by which other nodes know this one, which is rank zero's."""
    for neighbour in neighbours[:_MOST_NEIGHBOURS]:
        theirs, refused = _best(host.resolve(neighbour), host)
        own = None if theirs is None else host.source_address(theirs)
        interface = holder(own, host.interfaces)
        if own is not None and interface is not None:
            rule = f"what this node sends from to {neighbour}; the other nodes ask for this node's name, which may mean 127.0.1.1 here"
            return Fact(value=own, source=f"this node's {interface.name}", rule=rule, refused=refused)
    asked = ", ".join(neighbours[:_MOST_NEIGHBOURS])
    return Fact(
        rule=f"no address of {asked} is known here, so no network of the nodes': export MASTER_ADDR in the job script"
    )


def _best(addresses: Sequence[str], host: Host) -> tuple[str | None, tuple[Refused, ...]]:
    """Return the address of another node to use, on the fastest network that leads to one, and why not the others."""
    refused = {text: why for text in addresses if (why := _address_refusal(text, host)) is not None}
    routes = {text: route for text in addresses if text not in refused and (route := host.leads_to(text)) is not None}
    ranked = sorted(routes, key=lambda text: (by_speed(routes[text]), _as_number(text)))
    refused |= {text: f"not as fast: {fabric(routes[text])}" for text in ranked[1:]}
    return (ranked[0] if ranked else None), tuple(Refused(text, why) for text, why in refused.items())


def _address_refusal(text: str, host: Host) -> str | None:
    """Return why an address cannot be another node's that one can send to."""
    if not is_routable(ipaddress.ip_address(text.partition("%")[0])):
        return "loopback or link-local: it means another place on every node"
    if holder(text, host.interfaces) is not None:
        return "this host's own"
    return "no route leads there" if host.leads_to(text) is None else None


def _as_number(text: str) -> tuple[int, int]:
    ip = ipaddress.ip_address(text)
    return ip.version, int(ip)
