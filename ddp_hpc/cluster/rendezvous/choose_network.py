"""Choose the network on which the ranks meet: the fastest one that all nodes share."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.rendezvous.interfaces import Address, Interface, Network
from ddp_hpc.cluster.rendezvous.worker_env import Sourced

LOOPBACK_ADDRESS = "127.0.0.1"
ONE_NODE_REASON = "the ranks are on one node, and no other host has to reach it"
"""Why ranks meet on loopback."""
_DISCARD_PORT = 9

Chosen = tuple[Interface, Address, str]
"""The interface and address that were chosen, and why."""

_VIRTUAL_NAMES: Mapping[str, str] = {
    "docker*": "Docker's bridge",
    "br-*": "a bridge of Docker",
    "veth*": "the virtual link of a container",
    "podman*": "Podman's bridge",
    "nerdctl*": "a bridge of containers",
    "cni*": "Kubernetes' bridge",
    "kube*": "an interface of Kubernetes",
    "flannel*": "Kubernetes' overlay (Flannel)",
    "cali*": "the virtual link of a pod (Calico)",
    "vxlan*": "an overlay network",
    "cilium*": "Kubernetes' overlay (Cilium)",
    "weave*": "Kubernetes' overlay (Weave)",
    "antrea*": "Kubernetes' overlay (Antrea)",
    "ovs-*": "a virtual switch",
    "lxc*": "a bridge or virtual link of containers (LXC)",
    "lxd*": "a bridge of containers (LXD)",
    "incus*": "a bridge of containers (Incus)",
    "virbr*": "libvirt's bridge",
    "vnet*": "the virtual link of a virtual machine",
    "vmnet*": "VMware's bridge",
    "vboxnet*": "VirtualBox's bridge",
    "tun*": "a tunnel",
    "tap*": "the virtual link of a virtual machine",
    "wg*": "a VPN (WireGuard)",
    "tailscale*": "a VPN (Tailscale)",
    "dummy*": "a dummy interface",
}
"""Virtual interfaces, by the names that their software gives them. Not by their driver: inside a container, the one good
network is a veth named eth0."""

_RULES: Sequence[tuple[Callable[[Interface], bool], str]] = (
    (lambda nic: nic.kind == "loopback", "loopback: other nodes cannot reach it"),
    (lambda nic: nic.kind == "virtual bridge", "a bridge without a physical port: it does not leave this node"),
    (lambda nic: nic.kind == "overlay", "an overlay network"),
    (lambda nic: nic.kind == "tunnel" or nic.is_point_to_point, "a tunnel"),
    (lambda nic: not nic.is_up, "down"),
    (lambda nic: not nic.addresses, "no address"),
    (lambda nic: not usable_addresses(nic), "only a link-local address"),
)
"""Why an interface is refused: the first rule that holds. `_VIRTUAL_NAMES` come before these."""

_FABRICS: Sequence[tuple[Callable[[Interface], bool], str]] = (
    (lambda nic: nic.kind == "infiniband" or nic.name.startswith("ib"), "InfiniBand"),
    (lambda nic: nic.name.startswith("hsn"), "Slingshot"),
    (lambda nic: nic.name.startswith(("hfi", "opa")), "Omni-Path"),
    (lambda nic: nic.kind == "rdma", "Ethernet with RDMA"),
    (lambda nic: nic.kind == "ethernet", "Ethernet"),
    (lambda nic: nic.kind == "wireless" or nic.name.startswith("wl"), "wireless"),
)
"""Kinds of network, by the first rule that holds. `_ORDER` sorts them, the fastest first. The speed that a driver
reports decides only within one kind: drivers often do not know it."""
_OTHER_FABRIC = "another network"
_ORDER = ("InfiniBand", "Slingshot", "Omni-Path", "Ethernet with RDMA", "Ethernet", _OTHER_FABRIC, "wireless")


def why_unusable(interface: Interface) -> str | None:
    """Return why ranks cannot meet on this interface, or None if they can."""
    by_name = (words for pattern, words in _VIRTUAL_NAMES.items() if fnmatchcase(interface.name, pattern))
    by_fact = (words for holds, words in _RULES if holds(interface))
    return next(chain(by_name, by_fact), None)


def usable_addresses(interface: Interface) -> tuple[Address, ...]:
    """Return the addresses that other nodes can reach, IPv4 first."""
    return tuple(sorted(filter(is_routable, interface.ips), key=lambda ip: ip.version))


def is_routable(ip: Address) -> bool:
    """Tell whether other nodes may reach an address: it is not loopback, link-local, unspecified or multicast."""
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast)


def fabric(interface: Interface) -> str:
    """Return the kind of network, as text."""
    return next((words for holds, words in _FABRICS if holds(interface)), _OTHER_FABRIC)


def speed_order(kind: str) -> int:
    """Return the place of a kind of network among all, the fastest first."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def by_speed(interface: Interface) -> tuple[int, int, list[str | int]]:
    """Return a sort key: the fastest first, equal ones by name, `enp71s0` before `enp105s0`."""
    parts = [int(one) if one.isdecimal() else one for one in re.split(r"(\d+)", interface.name)]
    return speed_order(fabric(interface)), -(interface.speed_mbps or 0), parts


def usable_interfaces(interfaces: Iterable[Interface], preferred: Sequence[str] = ()) -> list[Interface]:
    """Return the interfaces on which ranks can meet: the preferred ones first, then the fastest."""
    usable_nics = (nic for nic in interfaces if why_unusable(nic) is None)
    return sorted(usable_nics, key=lambda nic: (_preference(nic, preferred), by_speed(nic)))


def _preference(nic: Interface, preferred: Sequence[str]) -> int:
    """Return the number of the first pattern that fits; if none does, the number of patterns."""
    return next((number for number, pattern in enumerate(preferred) if fnmatchcase(nic.name, pattern)), len(preferred))


def choose_address(
    facts_by_node: Mapping[str, Sequence[Interface]], order: Sequence[str], preferred: Sequence[str] = ()
) -> Sourced:
    """Choose the address at which the other ranks connect, among the networks of rank zero's node, which is the first in `order`.

    Interfaces whose names fit one of `preferred` come before all others, if all nodes can reach them.

    With facts of all nodes: the fastest network on which every node has an address in the same subnet. If there is none,
    routers may connect the subnets: then the fastest kind of network that all nodes have. With facts of rank zero's node
    alone: its fastest network.
    """
    zero = order[0]
    candidates = usable_interfaces(facts_by_node[zero], preferred)
    if not candidates:
        found = "; ".join(f"{nic.name}: {why_unusable(nic)}" for nic in facts_by_node[zero])
        raise ConfigError(
            f"{zero} has no network interface on which ranks can meet ({found or 'it has none'}). "
            f"Set MASTER_ADDR to an address of {zero} that the other nodes can reach."
        )
    others = {node: usable_interfaces(facts_by_node[node]) for node in order[1:] if node in facts_by_node}
    best, asked = candidates[0], "the only node" if len(order) == 1 else "the only node whose networks are known"
    taken, address = best, usable_addresses(best)[0]
    why = f"the fastest network of {zero}, {asked}: {_described(best)}"
    passed_over: dict[str, str] = {}
    if others:
        shared, passed_over = _choose_shared_subnet(zero, candidates, others)
        taken, address, why = shared or _choose_routed(zero, candidates, others)
    refused: dict[str, str] = {}
    for nic in facts_by_node[zero]:
        if nic != taken:
            is_less_wanted = _preference(nic, preferred) > _preference(taken, preferred)
            behind = f"{'not preferred' if is_less_wanted else 'slower'}: {_described(nic)}"
            refused[nic.name] = why_unusable(nic) or passed_over.get(nic.name) or behind
    rule = f"{taken.name}, {_why_preferred_or_not(taken, candidates, preferred)}{why}"
    return Sourced(value=str(address), source="network interfaces", rule=rule, refused=refused)


def _why_preferred_or_not(taken: Interface, candidates: Sequence[Interface], preferred: Sequence[str]) -> str:
    """Say that `network.interfaces` decided, or that no interface that it names is usable."""
    if not preferred:
        return ""
    patterns = ", ".join(preferred)
    if _preference(taken, preferred) == len(preferred):
        return f"no interface that `network.interfaces` names ({patterns}) reaches all nodes; "
    num_fitting = sum(_preference(nic, preferred) < len(preferred) for nic in candidates)
    return (
        f"`network.interfaces` names this interface ({patterns}); {'of those interfaces, ' if num_fitting > 1 else ''}"
    )


def _choose_shared_subnet(
    zero: str, candidates: Sequence[Interface], others: Mapping[str, Sequence[Interface]]
) -> tuple[Chosen | None, dict[str, str]]:
    """Choose the fastest network whose subnet all nodes share, or None; and say why faster ones are refused."""
    passed_over: dict[str, str] = {}
    for nic in candidates:
        subnets = [ipaddress.ip_interface(text) for text in nic.addresses]
        for subnet in sorted(subnets, key=lambda subnet: subnet.version):  # IPv4 first
            network, address = subnet.network, subnet.ip
            if not is_routable(address):
                continue
            problem = _why_not_shared(network, address, zero, others)
            if problem is None:
                where = f"{network}, {_described(nic)}{_other_names(nic, network, others)}"
                rule = f"the fastest network that all {len(others) + 1} nodes are on: {where}"
                return (nic, address, rule), passed_over
            passed_over.setdefault(nic.name, problem)
    return None, passed_over


def _choose_routed(zero: str, candidates: Sequence[Interface], others: Mapping[str, Sequence[Interface]]) -> Chosen:
    """Choose the fastest kind of network that all nodes have, or else the fastest network; routers must connect the subnets."""
    # What has the same address on another node, as the management card's does, leads to the node itself.
    taken = {address for has in others.values() for nic in has for address in usable_addresses(nic)}
    candidates = [nic for nic in candidates if usable_addresses(nic)[0] not in taken] or candidates
    for nic in candidates:
        if all(any(fabric(theirs) == fabric(nic) for theirs in has) for has in others.values()):
            rule = f"no subnet has all nodes; {fabric(nic)} is the fastest kind that all nodes have, and routers must connect them"
            return nic, usable_addresses(nic)[0], rule
    best = candidates[0]
    rule = f"the nodes share neither a subnet nor a kind of network; this is the fastest of {zero}, and routers must connect them"
    return best, usable_addresses(best)[0], rule


def _why_not_shared(
    network: Network, address: Address, zero: str, others: Mapping[str, Sequence[Interface]]
) -> str | None:
    """Return why not all nodes share a subnet of rank zero's node, or None if they do."""
    for node, interfaces in others.items():
        theirs = [ip for nic in interfaces for ip in usable_addresses(nic) if ip in network]
        if not theirs:
            return f"{node} has no address in {network}"
        if address in theirs:  # container bridges have the same address on every node
            return f"{zero} and {node} both have the address {address}: their networks {network} are not connected"
    return None


def _other_names(nic: Interface, network: Network, others: Mapping[str, Sequence[Interface]]) -> str:
    """Return the names of the interface on other nodes, each with one node as an example."""
    there = {
        node: [theirs.name for theirs in interfaces if any(ip in network for ip in usable_addresses(theirs))]
        for node, interfaces in others.items()
    }
    names = {names[0]: node for node, names in there.items() if names and nic.name not in names}
    return "".join(f"; {node} calls it {name}" for name, node in sorted(names.items()))


def _described(nic: Interface) -> str:
    return fabric(nic) if nic.speed_mbps is None else f"{fabric(nic)}, {nic.speed_mbps} Mbit/s"


def source_address(address: str) -> str | None:
    """Return the local address from which the kernel would send to a numeric address, or None if there is no route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # Connecting a UDP socket sends nothing: the kernel only looks up the route (udp(7), connect(2)).
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _DISCARD_PORT))
            found: str = probe.getsockname()[0]
    except OSError:
        return None
    return found


def interface_with_address(address: str | None, interfaces: Iterable[Interface]) -> Interface | None:
    """Return the interface that has a numeric address."""
    if address is None:
        return None
    wanted = ipaddress.ip_address(address.partition("%")[0])
    return next((nic for nic in interfaces if wanted in nic.ips), None)
