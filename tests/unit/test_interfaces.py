"""A node's interfaces, and the probe that prints them."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from ddp_hpc.cluster.rendezvous.interfaces import Interface, Kind, as_cidr, kind_of, local_interfaces
from tests.unit.made_network import node

TUN = {"type": "65534", "tun_flags": "0x1001"}


def device(folder: Path, **files: str) -> Path:
    """Lay out an interface as in /sys; a name that ends with a slash is a folder."""
    folder.mkdir()
    for name, text in {"type": "1", "uevent": "INTERFACE=x", **files}.items():
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("files", "folders", "kind"),
    [
        ({"type": "772"}, [], "loopback"),
        ({"type": "32"}, ["device/infiniband"], "infiniband"),
        ({}, [], "ethernet"),
        ({}, ["device"], "ethernet"),
        ({}, ["device/infiniband"], "rdma"),
        ({"uevent": "DEVTYPE=bond"}, ["lower_eth0/device/infiniband"], "rdma"),
        ({"uevent": "DEVTYPE=bridge"}, ["bridge", "lower_veth1"], "virtual bridge"),
        ({"uevent": "DEVTYPE=bridge"}, ["bridge", "lower_eth0/device"], "bridge"),
        ({"uevent": "DEVTYPE=bridge"}, ["bridge", "lower_bond0.7/lower_bond0/lower_eth0/device"], "bridge"),
        ({"uevent": "DEVTYPE=vlan"}, ["lower_bond0/lower_eth0/device/infiniband"], "rdma"),
        ({"uevent": "DEVTYPE=vxlan\nINTERFACE=x"}, [], "overlay"),
        ({"uevent": "DEVTYPE=wlan"}, ["phy80211", "device"], "wireless"),
        ({"type": "65534"}, [], "tunnel"),
        ({"tun_flags": "0x1002"}, [], "tunnel"),
        ({"type": "512"}, [], "tunnel"),
    ],
)
def test_sys_tells_what_an_interface_is(files: dict[str, str], folders: list[str], kind: Kind, tmp_path: Path) -> None:
    folder = device(tmp_path / "x", **files)
    for name in folders:
        (folder / name).mkdir(parents=True)

    assert kind_of(folder) == kind


def test_without_a_folder_it_is_taken_for_ethernet(tmp_path: Path) -> None:
    """An address with a label (`eth0:1`) is listed as an interface, but has none."""
    assert kind_of(tmp_path / "eth0:1") == "ethernet"


@pytest.mark.parametrize(
    ("address", "netmask", "text"),
    [
        ("10.0.0.1", "255.255.254.0", "10.0.0.1/23"),
        ("10.0.0.1", None, "10.0.0.1/32"),
        ("fd00::1", "ffff:ffff:ffff:ffff::", "fd00::1/64"),
        ("fe80::1%eth0", "ffff:ffff:ffff:ffff::", "fe80::1/64"),
    ],
)
def test_addresses_bear_their_prefix(address: str, netmask: str | None, text: str) -> None:
    assert as_cidr(address, netmask) == text


def test_this_host_has_a_loopback() -> None:
    (lo,) = [one for one in local_interfaces() if one.name == "lo"]

    assert lo.kind == "loopback"
    assert "127.0.0.1/8" in lo.addresses
    assert not lo.is_point_to_point


def test_what_is_written_can_be_read() -> None:
    facts = node(1)

    assert msgspec.convert(json.loads(json.dumps([asdict(one) for one in facts])), tuple[Interface, ...]) == facts


def probe(**environ: str) -> tuple[str, tuple[Interface, ...]]:
    argv = [sys.executable, "-m", "ddp_hpc.cluster.rendezvous.interfaces"]
    printed = subprocess.run(argv, env=environ, check=True, capture_output=True, text=True).stdout
    (line,) = printed.splitlines()
    answer = json.loads(line)
    return answer["node"], msgspec.convert(answer["interfaces"], tuple[Interface, ...])


def test_the_probe_prints_one_line() -> None:
    name, interfaces = probe()

    assert name == socket.gethostname()
    assert [one.name for one in interfaces] == [one.name for one in local_interfaces()]


def test_the_probe_calls_a_node_by_slurms_name() -> None:
    name, _ = probe(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node1", SLURM_TASKS_PER_NODE="1", SLURMD_NODENAME="node1")

    assert name == "node1"


def test_the_probe_loads_little() -> None:
    """It starts on every node of a job, from a shared disk, before anything else can."""
    code = "import sys, ddp_hpc.cluster.rendezvous.interfaces; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()

    heavy = {"torch", "numpy", "yaml", "rich", "jinja2", "ddp_hpc.run.spec", "ddp_hpc.run.config", "ddp_hpc.cli"}

    assert "psutil" in loaded
    assert heavy & set(loaded) == set()
