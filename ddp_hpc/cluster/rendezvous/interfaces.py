"""Describe this node's network interfaces, and print them; `choice` decides which one to use.

    srun --ntasks-per-node=1 python -m ddp_hpc.cluster.rendezvous.interfaces --mark MARK

prints each node's answer in the short lines of `slurm.framing`; without a mark, it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from ddp_hpc.base.processes import kernel_text

Kind = Literal[
    "loopback", "infiniband", "rdma", "ethernet", "wireless", "bridge", "virtual bridge", "overlay", "tunnel"
]
"""`rdma`: Ethernet on a card that also offers RDMA (RoCE). `bridge`: a bridge with a physical port; a virtual bridge has
none. `overlay`: a network inside another (VXLAN). `tunnel`: to a VPN or a virtual machine. Interfaces for which /sys has
no kind, such as veth pairs, are `ethernet`."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

SYS_CLASS_NET = Path("/sys/class/net")

_KIND_OF_ARPHRD: Mapping[str, Kind] = {
    "772": "loopback",
    "32": "infiniband",
    "512": "tunnel",  # PPP
    "768": "tunnel",  # IP in IP
    "769": "tunnel",
    "776": "tunnel",  # IPv6 in IP
    "778": "tunnel",  # GRE
    "823": "tunnel",
    "65534": "tunnel",  # no link layer: tun devices, WireGuard
}
"""ARPHRD_* numbers of linux/if_arp.h, as in /sys/class/net/NAME/type."""

_KIND_OF_DEVTYPE: Mapping[str, Kind] = {
    "vxlan": "overlay",
    "geneve": "overlay",
    "wireguard": "tunnel",
    "wlan": "wireless",
}
"""DEVTYPE of a driver, as in /sys/class/net/NAME/uevent."""


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One network interface, as the kernel describes it."""

    name: str
    kind: Kind
    is_up: bool
    """The interface is up, and has a link."""
    speed_mbps: int | None = None
    """None if the driver does not report it."""
    addresses: tuple[str, ...] = ()
    """Addresses with their prefix length: `10.0.0.1/24`, `fd00::1/64`."""
    is_point_to_point: bool = False

    @property
    def ips(self) -> tuple[Address, ...]:
        return tuple(ipaddress.ip_interface(text).ip for text in self.addresses)


def local_interfaces() -> tuple[Interface, ...]:
    """Return this host's interfaces, sorted by name."""
    addresses, stats = psutil.net_if_addrs(), psutil.net_if_stats()
    return tuple(
        Interface(
            name=name,
            kind=kind_of(SYS_CLASS_NET / name),
            is_up=name in stats and stats[name].isup,
            speed_mbps=(stats[name].speed if name in stats else 0) or None,
            addresses=tuple(
                as_cidr(address.address, address.netmask)
                for address in addresses[name]
                if address.family in (socket.AF_INET, socket.AF_INET6)
            ),
            is_point_to_point=name in stats and "pointopoint" in stats[name].flags.split(","),
        )
        for name in sorted(addresses)
    )


def as_cidr(address: str, netmask: str | None) -> str:
    """Return `10.0.0.1/24` for an address and its netmask; a scope (`%eth0`) is cut off."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    length = ip.max_prefixlen if netmask is None else int(ipaddress.ip_address(netmask)).bit_count()
    return f"{ip}/{length}"


def kind_of(folder: Path) -> Kind:
    """Return the kind of an interface, by its directory in /sys."""
    # https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-class-net
    # An address with a label (`eth0:1`) has no directory.
    kind = _KIND_OF_ARPHRD.get(kernel_text(folder / "type").strip())
    if kind is not None:
        return kind
    if (folder / "tun_flags").exists():
        return "tunnel"
    # A bridge, a bond or a VLAN has its card below it: `br0` on `bond0.100` on `bond0` on `eth0`.
    cards = [card for depth in range(5) for card in folder.glob("lower_*/" * depth + "device")]
    if (folder / "bridge").exists():
        return "bridge" if cards else "virtual bridge"
    if (folder / "phy80211").exists():
        return "wireless"
    uevent = dict(line.partition("=")[::2] for line in kernel_text(folder / "uevent").splitlines())
    of_driver = _KIND_OF_DEVTYPE.get(uevent.get("DEVTYPE", ""))
    if of_driver is not None:
        return of_driver
    return "rdma" if any((card / "infiniband").exists() for card in cards) else "ethernet"


def main() -> None:
    """Print this node's name and interfaces."""
    from ddp_hpc.cluster.slurm.allocation import node_name  # late: only this command needs it
    from ddp_hpc.cluster.slurm.framing import framed

    parser = argparse.ArgumentParser(prog="ddp_hpc.cluster.rendezvous.interfaces", description=__doc__)
    parser.add_argument(
        "--mark", help="mark the lines of the answer with this word, so that a reader of srun's output finds them"
    )
    mark = parser.parse_args().mark
    node, plain = node_name(os.environ), [asdict(interface) for interface in local_interfaces()]
    answer = framed(plain, node=node, mark=mark) if mark else json.dumps({"node": node, "interfaces": plain}) + "\n"
    sys.stdout.write(answer)


if __name__ == "__main__":
    main()
