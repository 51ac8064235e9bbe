"""Find rank zero's address where the user has not set it: for a run's supervisor, for a shell of a job, and for a task of a plain `srun`.

A process that decides for all ranks takes the fastest network of rank zero's node. A supervisor asks the other nodes first, where that
can change the choice; a shell does not. The tasks of a plain `srun` share only Slurm's variables and the name service: each
searches alone, and all must agree. Two other sources are not used, although all tasks of a step would read the same from them.
The address of the host that srun runs on may be a login node's, or loopback. The address in `scontrol show node` costs one
request to the controller for each task, and often is the node's name again.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ddp_hpc.base.errors import ConfigError, DdpHpcError, WorkerError
from ddp_hpc.cluster.rendezvous.choose_network import (
    LOOPBACK_ADDRESS,
    ONE_NODE_REASON,
    by_speed,
    choose_address,
    interface_with_address,
    is_routable,
    source_address,
    why_unusable,
)
from ddp_hpc.cluster.rendezvous.interfaces import Interface, local_interfaces
from ddp_hpc.cluster.rendezvous.ports import is_free
from ddp_hpc.cluster.rendezvous.worker_env import OUR_SOURCE, USERS, Sourced
from ddp_hpc.cluster.slurm.allocation import Allocation

AskInterfaces = Callable[[], Mapping[str, Sequence[Interface]]]
"""Asks the nodes of the job for their interfaces; a node that does not answer is left out."""
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

    def interface_to(self, address: str) -> Interface | None:
        """Return the interface through which the kernel sends to a numeric address."""
        return interface_with_address(self.source_address(address), self.interfaces)

    def address_of(self, name: str) -> str | None:
        """Return the address of another node's name on the fastest network that leads there; of equal ones, the lowest."""
        routes: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, Interface] = {}
        for ip in (ipaddress.ip_address(text.partition("%")[0]) for text in self.resolve(name)):
            route = self.interface_to(str(ip))
            if route is not None and is_routable(ip) and interface_with_address(str(ip), self.interfaces) is None:
                routes[ip] = route
        best = min(routes, key=lambda ip: (by_speed(routes[ip]), ipaddress.get_mixed_type_key(ip)), default=None)
        return None if best is None else str(best)

    def numeric_address(self, name: str, *, may_be_loopback: bool) -> str | None:
        """Return an address of a name that other nodes reach: a node may resolve its own name to 127.0.1.1 (/etc/hosts).

        An address is returned as it is. With `may_be_loopback`, an address on loopback is better than none.
        """
        try:
            ipaddress.ip_address(name)
        except ValueError:
            plain = {text: ipaddress.ip_address(text.partition("%")[0]) for text in self.resolve(name)}
            found = sorted(plain, key=lambda text: not is_routable(plain[text]))  # link-local ones last
            others = [text for text in found if not plain[text].is_loopback]
            return next(iter(others or (found if may_be_loopback else ())), None)
        return name

    def interface_towards(self, address: str) -> Sourced:
        """Return the name of this node's interface on the route to rank zero."""
        interface = self.interface_to(address)
        if interface is None:
            return Sourced(rule=f"this node has no route to {address}, so the libraries choose the interface")
        rule = f"the interface of this node on the route to {address}"
        return Sourced(value=interface.name, source="routing table", rule=rule)


def this_host() -> Host:
    """Return the host that this process runs on."""
    return Host(interfaces=local_interfaces(), num_cpus=len(os.sched_getaffinity(0)))


def address_for_task(environ: Mapping[str, str], allocation: Allocation | None, host: Host) -> Sourced:
    """Return rank zero's address: the user's, or else the one that this process finds; without a value where it finds none."""
    if users := environ.get("MASTER_ADDR"):
        return Sourced(value=users, source=USERS, rule="already set in the environment, so not changed")
    if allocation is None:
        return Sourced(value=LOOPBACK_ADDRESS, source=OUR_SOURCE, rule="a single process, no Slurm job")
    try:
        return find_address(allocation, host)
    except DdpHpcError as error:
        return Sourced(rule=str(error))


def find_address(
    allocation: Allocation, host: Host, *, preferred: Sequence[str] = (), ask: AskInterfaces | None = None
) -> Sourced:
    """Return the address at which this process should connect to rank zero.

    A supervisor passes `ask`, and the interfaces that the user prefers; it decides for all nodes of the job.
    """
    step = allocation.step if ask is None else None
    nodes = step.node_names if step else allocation.node_names
    zero, here = (step.rank_zero_node, nodes[step.node_rank]) if step else (nodes[0], allocation.node_name)
    if zero is None:
        raise ConfigError(
            "a hostfile (`--distribution=arbitrary`) may put rank zero on any node: set MASTER_ADDR yourself"
        )
    others = [node for node in nodes if node != zero]
    if not others and not preferred:
        return Sourced(value=LOOPBACK_ADDRESS, source=OUR_SOURCE, rule=ONE_NODE_REASON)
    if step is None:
        own = {zero: host.interfaces} if here == zero else {}
        is_plain = own and (not others or sum(why_unusable(interface) is None for interface in host.interfaces) == 1)
        facts = own if is_plain or ask is None else {**ask(), **own}
        if zero in facts:
            return choose_address(facts, nodes, preferred)
    if step and here == zero:
        return _find_own_address(zero, others[:_MOST_NEIGHBOURS], host)
    return _resolve_zero(zero, host, is_for_all=ask is not None)


def _find_own_address(zero: str, others: Sequence[str], host: Host) -> Sourced:
    """Return the address of this node, which is rank zero's, from which it would send to another one.

    It does not resolve its own name: on Debian, /etc/hosts maps it to 127.0.1.1
    (https://www.debian.org/doc/manuals/debian-reference/ch05.en.html). If all names of nodes belong to one network, as Slurm
    needs it, this is the address that the others find. If not, it is still an address of this node, and rank zero's store
    listens on all addresses.
    """
    for name in others:
        if (theirs := host.address_of(name)) is not None:
            rule = f"{name} reaches this node at this address; this node's own name is not used, as it may mean 127.0.1.1 on this node itself"
            return Sourced(value=host.source_address(theirs), source="routing table", rule=rule)
    raise _address_error(zero, others)


def _resolve_zero(zero: str, host: Host, *, is_for_all: bool) -> Sourced:
    """Return the address to which this host resolves the name of rank zero's node."""
    address = host.address_of(zero)
    if address is None:
        raise _address_error(zero, [zero])
    rule = f"this host resolves {zero} to this address; other nodes resolve it, too, and {zero} itself uses its routing table"
    if is_for_all:
        rule = f"the address to which this host resolves {zero}, which did not say its networks"
    return Sourced(value=address, source="name service", rule=rule)


def _address_error(zero: str, asked: Sequence[str]) -> WorkerError:
    return WorkerError(
        f"this host cannot resolve {', '.join(asked)} to an address that it can reach. Set MASTER_ADDR to an IP address of {zero}, the node of "
        "rank zero (in a job script: with `export`)."
    )
