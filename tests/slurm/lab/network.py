"""The cables: a namespace a node, and two switches in the head's."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.lab.settings import ETH, IB, Lab, Settings, address
from tests.slurm.lab.tools import attempt, sh

NETNS = Path("/run/netns")
NETWORKS = (("eth0", "br-eth", ETH), ("ib0", "br-ib", IB))


def up(lab: Lab, settings: Settings) -> None:
    """Lay what is not there yet."""
    for node in settings.hostnames:
        if not (NETNS / lab.netns(node)).exists():
            sh("ip", "netns", "add", lab.netns(node))
        sh("ip", "-n", lab.netns(node), "link", "set", "lo", "up")
    head = lab.netns("head")
    for _, bridge, network in NETWORKS:
        if not _has_link(head, bridge):
            sh("ip", "-n", head, "link", "add", bridge, "type", "bridge", "forward_delay", "0")
            sh("ip", "-n", head, "addr", "add", f"{network}.1/24", "dev", bridge)
            sh("ip", "-n", head, "link", "set", bridge, "up")
    for node in settings.workers:
        for interface, bridge, network in NETWORKS:
            if not _has_link(head, f"{interface}-{node}"):
                _lay_cable(lab, node, interface, bridge)
                own = lab.netns(node)
                sh("ip", "-n", own, "addr", "add", f"{address(node, network)}/24", "dev", interface)
                sh("ip", "-n", own, "link", "set", interface, "up")
                if interface == "eth0" and settings.eth_rate:
                    _slow_down(own, settings.eth_rate)


def _has_link(netns: str, name: str) -> bool:
    return attempt("ip", "-n", netns, "link", "show", name).returncode == 0


def _lay_cable(lab: Lab, node: str, interface: str, bridge: str) -> None:
    head, port = lab.netns("head"), f"{interface}-{node}"
    veth = ["type", "veth", "peer", "name", interface, "netns", lab.netns(node)]
    sh("ip", "-n", head, "link", "add", port, *veth)
    sh("ip", "-n", head, "link", "set", port, "master", bridge, "up")


def _slow_down(netns: str, rate: str) -> None:
    tbf = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
    sh("tc", "-n", netns, "qdisc", "add", "dev", "eth0", "root", *tbf)


def down(lab: Lab) -> None:
    for path in sorted(NETNS.glob(f"{lab.prefix}-*")):
        attempt("ip", "netns", "del", path.name)


def set_cable(lab: Lab, node: str, interface: str, *, plugged: bool) -> None:
    """Cut a node's cable at the switch, or plug it in again."""
    sh("ip", "-n", lab.netns("head"), "link", "set", f"{interface}-{node}", "up" if plugged else "down")
