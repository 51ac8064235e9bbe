"""Which network the ranks meet on: the fastest that all nodes share, by tables that can be read out loud."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import NamedTuple

from ddp_hpc.errors import ConfigError
from ddp_hpc.rendezvous.interfaces import Address, Interface, Network

_DISCARD_PORT = 9


@dataclass(frozen=True)
class Refused:
    """A candidate that was not taken."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Where rank zero's node is to be met."""

    interface: str
    """Its name on rank zero's node; other nodes may call theirs otherwise."""
    address: str
    rule: str
    """Why this one, in words."""
    refused: tuple[Refused, ...] = ()
    """The other interfaces of rank zero's node."""


_VIRTUAL_NAMES: Mapping[str, str] = {
    "docker*": "Docker's bridge",
    "br-*": "a bridge of Docker's",
    "veth*": "a container's cable",
    "podman*": "Podman's bridge",
    "nerdctl*": "a bridge of containers",
    "cni*": "Kubernetes' bridge",
    "kube*": "Kubernetes' own",
    "flannel*": "Kubernetes' overlay (Flannel)",
    "cali*": "a pod's cable (Calico)",
    "vxlan*": "an overlay",
    "cilium*": "Kubernetes' overlay (Cilium)",
    "weave*": "Kubernetes' overlay (Weave)",
    "antrea*": "Kubernetes' overlay (Antrea)",
    "ovs-*": "a virtual switch",
    "lxc*": "a bridge or a cable of containers (LXC)",
    "lxd*": "a bridge of containers (LXD)",
    "incus*": "a bridge of containers (Incus)",
    "virbr*": "libvirt's bridge",
    "vnet*": "a virtual machine's cable",
    "vmnet*": "VMware's bridge",
    "vboxnet*": "VirtualBox's bridge",
    "tun*": "a tunnel",
    "tap*": "a virtual machine's cable",
    "wg*": "a VPN (WireGuard)",
    "tailscale*": "a VPN (Tailscale)",
    "dummy*": "a dummy",
}
"""Interfaces that lead nowhere, or round about, by the names their makers give them. Not by their driver: inside a
container, the one good network is a veth named eth0."""

_RULES: Sequence[tuple[Callable[[Interface], bool], str]] = (
    (lambda one: one.kind == "loopback", "loopback: no other node gets here"),
    (lambda one: one.kind == "virtual bridge", "a bridge without a physical port: it ends on this node"),
    (lambda one: one.kind == "overlay", "an overlay network"),
    (lambda one: one.kind == "tunnel" or one.is_point_to_point, "a tunnel"),
    (lambda one: not one.is_up, "down"),
    (lambda one: not one.addresses, "no address"),
    (lambda one: not usable(one), "only a link-local address"),
)
"""What an interface is refused for, the first that fits; names come before."""

_FABRICS: Sequence[tuple[Callable[[Interface], bool], str]] = (
    (lambda one: one.kind == "infiniband" or one.name.startswith("ib"), "InfiniBand"),
    (lambda one: one.name.startswith("hsn"), "Slingshot"),
    (lambda one: one.name.startswith(("hfi", "opa")), "Omni-Path"),
    (lambda one: one.kind == "rdma", "Ethernet with RDMA"),
    (lambda one: one.kind == "ethernet" and one.name.startswith(("bond", "team", "en", "eth")), "Ethernet"),
    (lambda one: one.kind == "wireless" or one.name.startswith("wl"), "wireless"),
)
"""Kinds of network, the fastest first. Speed decides only within one: drivers often do not know it."""
_OTHER_FABRIC = "another network"
_ORDER = ("InfiniBand", "Slingshot", "Omni-Path", "Ethernet with RDMA", "Ethernet", _OTHER_FABRIC, "wireless")


def refusal(interface: Interface) -> str | None:
    """Return why ranks must not meet on this interface, or None where they may."""
    by_name = (words for pattern, words in _VIRTUAL_NAMES.items() if fnmatchcase(interface.name, pattern))
    by_fact = (words for holds, words in _RULES if holds(interface))
    return next(chain(by_name, by_fact), None)


def usable(interface: Interface) -> tuple[Address, ...]:
    """Return the addresses that other nodes can send to, IPv4 first."""
    return tuple(sorted(filter(is_routable, interface.ips), key=lambda ip: ip.version))


def is_routable(ip: Address) -> bool:
    """Tell whether an address means the same on every node."""
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast)


def fabric(interface: Interface) -> str:
    """Return the kind of network, in words."""
    return next((words for holds, words in _FABRICS if holds(interface)), _OTHER_FABRIC)


def by_speed(interface: Interface) -> tuple[int, int, str]:
    """Return a key that sorts the fastest first; names make it definite."""
    return _ORDER.index(fabric(interface)), -(interface.speed_mbps or 0), interface.name


def accepted(interfaces: Iterable[Interface], preferred: Sequence[str] = ()) -> list[Interface]:
    """Return those that ranks may meet on: the preferred ones first, then the fastest."""
    usable_ones = (one for one in interfaces if refusal(one) is None)
    return sorted(usable_ones, key=lambda one: (_preference(one, preferred), by_speed(one)))


def _preference(one: Interface, preferred: Sequence[str]) -> int:
    """Return which of the patterns fits first; none counts as last."""
    return next((number for number, pattern in enumerate(preferred) if fnmatchcase(one.name, pattern)), len(preferred))


def choose_fabric(
    facts_by_node: Mapping[str, Sequence[Interface]], order: Sequence[str], preferred: Sequence[str] = ()
) -> Choice:
    """Choose among the networks of rank zero's node, which is the first in `order`.

    Interfaces whose names fit one of `preferred` come before all others, as long as all nodes can be met there.

    With facts of all nodes: the fastest network on which every node has an address in the same subnet. Where there is
    none, routers may lead from one subnet to the other: then the fastest kind of network that all nodes have. With
    facts of rank zero's node alone: its fastest.

    Raises:
        ConfigError: where that node has no network at all.
    """
    zero = order[0]
    candidates = accepted(facts_by_node[zero], preferred)
    if not candidates:
        found = "; ".join(f"{one.name}: {refusal(one)}" for one in facts_by_node[zero])
        raise ConfigError(
            f"{zero} has no network interface that ranks could meet on ({found or 'it has none'}). "
            "Name an address of it in MASTER_ADDR."
        )
    others = {node: accepted(facts_by_node[node]) for node in order[1:] if node in facts_by_node}
    taken, passed_over = _alone(zero, candidates[0], len(order)), dict[str, str]()
    if others:
        shared, passed_over = _shared(zero, candidates, others)
        taken = shared or _routed(zero, candidates, others)
    return Choice(
        interface=taken.interface.name,
        address=str(taken.address),
        rule=f"{_asked_for(taken.interface, candidates, preferred)}{taken.rule}",
        refused=tuple(
            Refused(one.name, refusal(one) or passed_over.get(one.name) or _behind(one, taken.interface, preferred))
            for one in facts_by_node[zero]
            if one != taken.interface
        ),
    )


def _behind(one: Interface, taken: Interface, preferred: Sequence[str]) -> str:
    is_less_wanted = _preference(one, preferred) > _preference(taken, preferred)
    return f"{'not preferred' if is_less_wanted else 'not as fast'}: {_described(one)}"


def _asked_for(taken: Interface, candidates: Sequence[Interface], preferred: Sequence[str]) -> str:
    """Say that the choice was among those that were asked for, or that none of them could be taken."""
    if not preferred:
        return ""
    patterns = ", ".join(preferred)
    if _preference(taken, preferred) == len(preferred):
        return f"none that `network.interfaces` names ({patterns}) leads to all nodes; "
    num_fitting = sum(_preference(one, preferred) < len(preferred) for one in candidates)
    return f"`network.interfaces` names it ({patterns}); {'of these ' if num_fitting > 1 else ''}"


class _Taken(NamedTuple):
    """What is taken, and why."""

    interface: Interface
    address: Address
    rule: str


def _alone(zero: str, best: Interface, num_nodes: int) -> _Taken:
    """Take the fastest, by the facts of one node."""
    asked = "the only node" if num_nodes == 1 else "the only node that was asked"
    return _Taken(best, usable(best)[0], f"the fastest network of {zero}, {asked}: {_described(best)}")


def _shared(
    zero: str, candidates: Sequence[Interface], others: Mapping[str, Sequence[Interface]]
) -> tuple[_Taken | None, dict[str, str]]:
    """Take the fastest whose subnet all nodes are on, if any; and say why not those before it."""
    passed_over: dict[str, str] = {}
    for one in candidates:
        for network, address in _networks(one):
            problem = _not_shared(network, address, zero, others)
            if problem is None:
                where = f"{network}, {_described(one)}{_other_names(one, network, others)}"
                return _Taken(
                    one, address, f"the fastest network that all {len(others) + 1} nodes are on: {where}"
                ), passed_over
            passed_over.setdefault(one.name, problem)
    return None, passed_over


def _routed(zero: str, candidates: Sequence[Interface], others: Mapping[str, Sequence[Interface]]) -> _Taken:
    """Take the fastest of a kind that all nodes have, or else the fastest, and leave it to routers."""
    for one in candidates:
        if all(any(fabric(theirs) == fabric(one) for theirs in has) for has in others.values()):
            rule = f"no subnet has all nodes; {fabric(one)} is the fastest that all have, and routers must lead to it"
            return _Taken(one, usable(one)[0], rule)
    best = candidates[0]
    rule = f"nodes share neither subnet nor kind of network; this is {zero}'s fastest, and routers must lead to it"
    return _Taken(best, usable(best)[0], rule)


def _networks(one: Interface) -> list[tuple[Network, Address]]:
    """Return the subnets of an interface that may be shared, and its own address in each, IPv4 first."""
    both = [ipaddress.ip_interface(text) for text in one.addresses]
    return sorted(((it.network, it.ip) for it in both if is_routable(it.ip)), key=lambda pair: pair[1].version)


def _not_shared(network: Network, address: Address, zero: str, others: Mapping[str, Sequence[Interface]]) -> str | None:
    """Return why a subnet of rank zero's node is not one that all nodes are on, or None where it is."""
    for node, interfaces in others.items():
        theirs = [ip for one in interfaces for ip in usable(one) if ip in network]
        if not theirs:
            return f"{node} has no address in {network}"
        if address in theirs:  # bridges of containers have the same address wherever they are
            return f"{zero} and {node} both have {address}: each has a network {network} of its own"
    return None


def _other_names(one: Interface, network: Network, others: Mapping[str, Sequence[Interface]]) -> str:
    """Say what else it is called, and by which node for example."""
    names = {
        theirs.name: node
        for node, interfaces in others.items()
        for theirs in interfaces
        if any(ip in network for ip in usable(theirs))
    }
    return "".join(f"; {node} calls it {name}" for name, node in sorted(names.items()) if name != one.name)


def _described(one: Interface) -> str:
    return fabric(one) if one.speed_mbps is None else f"{fabric(one)}, {one.speed_mbps} Mbit/s"


def source_address(address: str) -> str | None:
    """Return the address that the kernel would send from to a numeric one, or None where no route leads there.

    Nothing is sent: connecting a UDP socket only looks up the route.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD_PORT))
            found: str = probe.getsockname()[0]
    except OSError:
        return None
    return found


def holder(address: str | None, interfaces: Iterable[Interface]) -> Interface | None:
    """Return the interface that has a numeric address."""
    if address is None:
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((one for one in interfaces if wanted in one.ips), None)
