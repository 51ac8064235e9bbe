"""Nodes of a made-up cluster, as far as their network goes: a namespace each, and a switch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.job.ending.network_probe import probe_network
from ddp_hpc.run.run_dir.network import NetworkFindings
from tests.distributed import stands_for_srun

TOWARD = "10.213.0.1"


@dataclass(frozen=True)
class Nodes:
    """Namespaces, by the names of the nodes; node1 is rank zero's."""

    namespaces: dict[str, str]

    def ip(self, node: str, *words: str) -> None:
        call("ip", "-n", self.namespaces[node], *words)

    def tc(self, node: str, *words: str) -> None:
        """Shape what a node sends (tc(8))."""
        call("tc", "-n", self.namespaces[node], *words)

    def drop_from(self, node: str, sender: str, *more: str) -> None:
        """Have a node drop what another one sends."""
        source = f"10.213.0.{list(self.namespaces).index(sender) + 1}"
        call("ip", "netns", "exec", self.namespaces[node], "iptables", "-A", "INPUT", "-s", source, *more, "-j", "DROP")

    def probe(self, *, unreached: Sequence[str] = (), ready_s: float = 30.0) -> NetworkFindings:
        """Probe as a supervisor does, over what stands for Slurm's network."""
        plan = {node: None if node in unreached else name for node, name in self.namespaces.items()}
        return probe_network(
            list(plan), TOWARD, step_argv=lambda nodes: step_argv({node: plan[node] for node in nodes}), ready_s=ready_s
        )


def step_argv(plan: dict[str, str | None]) -> list[str]:
    """Return what stands for srun's command."""
    return [sys.executable, str(Path(stands_for_srun.__file__)), json.dumps(plan)]


def why_not() -> str:
    """Return why this machine cannot have such nodes."""
    if os.geteuid():
        return "only root can make network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", "ip link add name swi type bridge && iptables -L >/dev/null"],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"no namespaces with a bridge and a firewall: {tried.stderr.decode()}"


@contextmanager
def made(num_nodes: int) -> Iterator[Nodes]:
    """Make nodes with one network, 10.213.0.0/24; remove them at the end."""
    names = [f"node{number}" for number in range(1, num_nodes + 1)]
    nodes = Nodes({name: f"np{os.getpid()}-{name}" for name in names})
    switch = f"np{os.getpid()}-switch"
    try:
        call("ip", "netns", "add", switch)
        call("ip", "-n", switch, "link", "add", "name", "swi", "type", "bridge", "forward_delay", "0")
        call("ip", "-n", switch, "link", "set", "swi", "up")
        for number, (name, own) in enumerate(nodes.namespaces.items(), 1):
            call("ip", "netns", "add", own)
            nodes.ip(name, "link", "set", "lo", "up")
            call("ip", "-n", switch, "link", "add", f"to-{name}", "type", "veth", "peer", "name", "fab0", "netns", own)
            call("ip", "-n", switch, "link", "set", f"to-{name}", "master", "swi", "up")
            nodes.ip(name, "addr", "add", f"10.213.0.{number}/24", "dev", "fab0", "noprefixroute")
            nodes.ip(name, "link", "set", "fab0", "up")
            nodes.ip(name, "route", "add", "10.213.0.0/24", "dev", "fab0", "src", f"10.213.0.{number}")
        yield nodes
    finally:
        for own in (*nodes.namespaces.values(), switch):
            subprocess.run(["ip", "netns", "del", own], capture_output=True, check=False)


def pull(nodes: Nodes, node: str) -> None:
    """Pull the cable of a node out of the switch."""
    _set_port(nodes, node, "down")


def put_back(nodes: Nodes, node: str) -> None:
    """Plug it in again."""
    _set_port(nodes, node, "up")


def _set_port(nodes: Nodes, node: str, state: str) -> None:
    switch = next(iter(nodes.namespaces.values())).rpartition("-")[0] + "-switch"
    call("ip", "-n", switch, "link", "set", f"to-{node}", state)


def call(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
