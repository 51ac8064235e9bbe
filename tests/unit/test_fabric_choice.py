"""Which network the ranks meet on."""

from __future__ import annotations

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.rendezvous.choose_network import (
    choose_address,
    fabric,
    source_address,
    usable_interfaces,
    why_unusable,
)
from ddp_hpc.cluster.rendezvous.interfaces import Interface, Kind
from ddp_hpc.cluster.rendezvous.worker_env import Sourced
from tests.unit.made_network import DOCKER, LO, interface, node

NODES = ["node1", "node2", "node3"]


def interface_of(choice: Sourced) -> str:
    return choice.rule.partition(",")[0]


@pytest.mark.parametrize(
    ("one", "why"),
    [
        (LO, "loopback"),
        (interface("eth0", "10.0.0.1/24", is_up=False), "down"),
        (interface("eth0"), "no address"),
        (interface("eth0", "169.254.3.4/16", "fe80::1/64"), "only a link-local address"),
        (interface("br0", "10.0.0.1/24", kind="virtual bridge"), "without a physical port"),
        (interface("mesh", "10.0.0.1/24", kind="overlay"), "an overlay"),
        (interface("vpn", "10.0.0.1/24", kind="tunnel"), "a tunnel"),
        (interface("ppp0", "10.0.0.1/24", is_point_to_point=True), "a tunnel"),
    ],
)
def test_a_network_that_leads_nowhere_is_refused(one: Interface, why: str) -> None:
    assert why in (why_unusable(one) or "")


@pytest.mark.parametrize(
    "name",
    [
        "docker0",
        "br-0123456789ab",
        "veth12ab",
        "virbr0",
        "vnet3",
        "cni0",
        "cni-podman0",
        "podman1",
        "flannel.1",
        "cali12345",
        "cilium_host",
        "lxcbr0",
        "lxdbr0",
        "kube-bridge",
        "vxlan.calico",
        "vmnet8",
        "tun0",
        "tunl0",
        "tap0",
        "wg0",
    ],
)
def test_networks_of_containers_and_virtual_machines_are_refused_by_name(name: str) -> None:
    assert why_unusable(interface(name, "172.17.0.1/16")) is not None


@pytest.mark.parametrize(
    "name", ["eth0", "ib0", "eno1", "enp5s0f0", "bond0", "hsn0", "ibs3", "br0", "bridge0", "vlan7", "wlan0"]
)
def test_real_networks_are_accepted(name: str) -> None:
    """Inside containers they may be veth pairs; it is their name that counts."""
    assert why_unusable(interface(name, "10.0.0.1/24")) is None


def test_a_bridge_with_a_physical_port_is_accepted() -> None:
    assert why_unusable(interface("br0", "10.0.0.1/24", kind="bridge")) is None


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("ib0", "ethernet", "InfiniBand"),
        ("ibp65s0", "infiniband", "InfiniBand"),
        ("hsn0", "ethernet", "Slingshot"),
        ("opa0", "ethernet", "Omni-Path"),
        ("enp1s0", "rdma", "Ethernet with RDMA"),
        ("bond0", "ethernet", "Ethernet"),
        ("eth0", "ethernet", "Ethernet"),
        ("p2p1", "ethernet", "Ethernet"),
        ("br0", "bridge", "another network"),
        ("wlan0", "wireless", "wireless"),
    ],
)
def test_fabrics_are_known_by_name_and_kind(name: str, kind: Kind, words: str) -> None:
    assert fabric(interface(name, "10.0.0.1/24", kind=kind)) == words


def test_the_fastest_comes_first_then_speed_then_name() -> None:
    names = ["wlan0", "enp105s0", "enp71s0", "data0", "hsn0", "ib1", "ib0"]
    speeds = {"data0": 25000}

    ordered = usable_interfaces(interface(name, "10.0.0.1/24", speed_mbps=speeds.get(name)) for name in names)

    assert [one.name for one in ordered] == ["ib0", "ib1", "hsn0", "data0", "enp71s0", "enp105s0", "wlan0"]


def test_all_nodes_meet_on_the_fastest_network_they_share() -> None:
    facts = {name: node(number) for number, name in enumerate(NODES, 1)}

    choice = choose_address(facts, NODES)

    assert (interface_of(choice), choice.value) == ("ib0", "10.78.0.11")
    assert choice.rule == "ib0, the fastest network that all 3 nodes are on: 10.78.0.0/24, InfiniBand, 10000 Mbit/s"
    assert choice.refused == {
        "docker0": "Docker's bridge",
        "eth0": "slower: Ethernet, 1000 Mbit/s",
        "lo": "loopback: other nodes cannot reach it",
    }


def test_the_network_that_the_user_prefers_comes_before_a_faster_one() -> None:
    facts = {name: node(number) for number, name in enumerate(NODES, 1)}

    choice = choose_address(facts, NODES, ["hsn*", "eth*"])

    assert (interface_of(choice), choice.value) == ("eth0", "10.77.0.11")
    assert choice.rule.startswith(
        "eth0, `network.interfaces` names this interface (hsn*, eth*); the fastest network that all 3 nodes"
    )
    assert choice.refused["ib0"] == "not preferred: InfiniBand, 10000 Mbit/s"


def test_of_several_preferred_networks_the_first_named_is_taken_then_the_fastest() -> None:
    names = ["eth0", "eth1", "ib0"]
    facts = {
        "node1": [interface(name, f"10.{number}.0.1/24", speed_mbps=10**number) for number, name in enumerate(names, 3)]
    }

    assert interface_of(choose_address(facts, ["node1"], ["eth*"])) == "eth1"
    assert interface_of(choose_address(facts, ["node1"], ["eth0", "eth*"])) == "eth0"


def test_a_preferred_network_that_does_not_lead_to_all_nodes_is_passed_over_and_said_so() -> None:
    facts = {"node1": node(1), "node2": (interface("ib0", "10.78.0.12/24"),)}

    choice = choose_address(facts, ["node1", "node2"], ["eth*"])

    assert interface_of(choice) == "ib0"
    assert choice.rule.startswith("ib0, no interface that `network.interfaces` names (eth*) reaches all nodes; ")


def test_names_may_differ_from_node_to_node() -> None:
    facts = {"node1": node(1, eth="eno1", ib="ib0"), "node2": node(2, eth="eth7", ib="ib1")}

    choice = choose_address(facts, ["node1", "node2"])

    assert (interface_of(choice), choice.value) == ("ib0", "10.78.0.11")
    assert choice.rule.endswith("; node2 calls it ib1")


def test_a_network_that_one_node_lacks_is_passed_over() -> None:
    down = interface("ib0", "10.78.0.12/24", is_up=False)
    facts = {"node1": node(1), "node2": (interface("eth0", "10.77.0.12/24"), down)}

    choice = choose_address(facts, ["node1", "node2"])

    assert (interface_of(choice), choice.value) == ("eth0", "10.77.0.11")
    assert choice.refused["ib0"] == "node2 has no address in 10.78.0.0/24"


def test_the_same_address_on_two_nodes_is_no_network() -> None:
    """Container engines give their bridge the same address everywhere; its name may tell nothing."""
    bogus = interface("ibridge", "192.168.0.1/24")
    facts = {name: (bogus, interface("eth0", f"10.0.0.{number}/24")) for number, name in enumerate(NODES)}

    choice = choose_address(facts, NODES)

    assert interface_of(choice) == "eth0"
    assert "node1 and node2 both have the address 192.168.0.1" in choice.refused["ibridge"]


def test_where_no_subnet_is_shared_routers_must_do() -> None:
    facts = {
        "node1": (interface("ib0", "10.1.0.1/24"), interface("eth0", "10.2.1.1/24")),
        "node2": (interface("eth1", "10.2.2.1/24"),),
    }

    choice = choose_address(facts, ["node1", "node2"])

    assert (interface_of(choice), choice.value) == ("eth0", "10.2.1.1")
    assert "routers must connect them" in choice.rule


def test_where_nothing_is_shared_rank_zeros_fastest_must_do() -> None:
    facts = {"node1": (interface("ib0", "10.1.0.1/24"),), "node2": (interface("eth1", "10.2.2.1/24"),)}

    choice = choose_address(facts, ["node1", "node2"])

    assert choice.value == "10.1.0.1"
    assert "neither a subnet nor a kind" in choice.rule


@pytest.mark.parametrize(
    ("order", "told"), [(["node1"], "the only node:"), (NODES, "the only node whose networks are known:")]
)
def test_with_facts_of_one_node_its_fastest_is_taken(order: list[str], told: str) -> None:
    choice = choose_address({"node1": node(1)}, order)

    assert choice.value == "10.78.0.11"
    assert told in choice.rule


def test_ipv4_comes_before_ipv6() -> None:
    both = {name: (interface("eth0", f"fd00::{n}/64", f"10.0.0.{n}/24"),) for n, name in enumerate(NODES, 1)}

    assert choose_address(both, NODES).value == "10.0.0.1"


def test_ipv6_alone_will_do() -> None:
    facts = {name: (LO, interface("eth0", f"fe80::{n}/64", f"fd00::{n}/64")) for n, name in enumerate(NODES, 1)}

    choice = choose_address(facts, NODES)

    assert choice.value == "fd00::1"
    assert "fd00::/64" in choice.rule


def test_a_node_without_a_network_is_told_so() -> None:
    with pytest.raises(ConfigError, match=r"node1 has no network interface .*docker0: Docker's bridge; lo: loopback"):
        choose_address({"node1": (DOCKER, LO)}, ["node1"])


def test_the_kernel_says_where_an_address_is_reached_from() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"


def test_an_address_that_another_node_has_too_leads_to_no_node() -> None:
    facts = {
        "node1": [
            LO,
            interface("usb0", "16.1.15.2/24", speed_mbps=10000),
            interface("eno1", "10.1.0.5/24", speed_mbps=1000),
        ],
        "node2": [
            LO,
            interface("usb0", "16.1.15.2/24", speed_mbps=10000),
            interface("eno1", "10.2.0.5/24", speed_mbps=1000),
        ],
    }

    assert choose_address(facts, list(facts), []).value == "10.1.0.5"
