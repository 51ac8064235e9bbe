"""Where the ranks of a job meet: the fastest network that all its nodes share, and a port that is free there.

The batch host decides before it starts any worker, so that each launcher can pass the endpoint on a command line. Ranks of
one node meet on loopback. If the batch host has only one network, it knows enough; else it asks every node once, by a short job step.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ddp_hpc.base.errors import ConfigError, WorkerError
from ddp_hpc.cluster.rendezvous.address import addresses_of, this_host
from ddp_hpc.cluster.rendezvous.choice import LOOPBACK, ONE_NODE, Choice, choose_fabric, refusal
from ddp_hpc.cluster.rendezvous.interfaces import Interface, local_interfaces, parse_interfaces
from ddp_hpc.cluster.rendezvous.ports import candidate_ports, is_free
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job.wire.endpoint import Meeting
from ddp_hpc.job.wire.subprocesses import ask_nodes

PROBE_TIMEOUT_S = 60.0
MOST_PORTS = 20
"""How many ports to try; if all are in use, something else is wrong."""


def meetings(
    allocation: Allocation, *, attempt: int, environ: Mapping[str, str], preferred: Sequence[str] = ()
) -> Iterator[Meeting]:
    """Yield endpoints, the best first; the user's own MASTER_ADDR and MASTER_PORT win, then `preferred` interfaces.

    Raises:
        ConfigError: where rank zero's node has no network, or MASTER_PORT is not a port.
        WorkerError: where no address of rank zero's node is known.
    """
    address, why = address_of(allocation, environ=environ, preferred=preferred)
    for port in _ports(allocation, attempt, environ.get("MASTER_PORT")):
        if not allocation.is_on_first_node or is_free(address, port):
            sys.stderr.write(f"ranks meet at {address} port {port}: {why}\n")
            yield Meeting(address, port, why)


def address_of(allocation: Allocation, *, environ: Mapping[str, str], preferred: Sequence[str] = ()) -> tuple[str, str]:
    """Return the address of rank zero's node at which the ranks meet, and why it is this one; raise as `meetings` does."""
    given = environ.get("MASTER_ADDR")
    is_one_node = len(allocation.node_names) == 1
    if given:
        return _numeric(given, is_one_node=is_one_node), "from MASTER_ADDR in the environment"
    if is_one_node and not preferred:
        return LOOPBACK, ONE_NODE
    choice = _choice(allocation, environ, preferred)
    refused = "; ".join(f"not {one.name}: {one.why}" for one in choice.refused)
    return choice.address, f"{choice.interface}, {choice.rule}{refused and f' ({refused})'}"


def _ports(allocation: Allocation, attempt: int, given: str | None) -> Iterator[int]:
    """Return the ports to try: the user's own, or those that belong to the job's number, others for each attempt."""
    if not given:
        return islice(candidate_ports(allocation.job_id, attempt), MOST_PORTS)
    if not given.isdecimal() or not 0 < int(given) < 2**16:
        raise ConfigError(
            f"MASTER_PORT is {given!r} in the environment, but it must be a port: 1 to 65535. Unset it to have one chosen."
        )
    return iter([int(given)])


def _numeric(text: str, *, is_one_node: bool) -> str:
    """Return an address of that host that all nodes reach: a node may resolve its own name to 127.0.1.1 (/etc/hosts)."""
    addresses = addresses_of(text)
    others_reach = [address for address in addresses if not ipaddress.ip_address(address).is_loopback]
    for address in others_reach or (addresses if is_one_node else []):
        return address
    raise ConfigError(
        f"MASTER_ADDR is {text!r} in the environment, but this node resolves it to no address that other nodes can "
        "reach. Set it to an IP address of the first node, or unset it to have one chosen."
    )


def _choice(allocation: Allocation, environ: Mapping[str, str], preferred: Sequence[str]) -> Choice:
    """Choose among the networks of rank zero's node; ask all nodes where that can change the choice."""
    here = local_interfaces()
    first, *others = allocation.node_names
    is_plain = not others or sum(refusal(interface) is None for interface in here) == 1
    if allocation.is_on_first_node and is_plain:
        return choose_fabric({first: here}, [first], preferred)
    facts = _ask_all(allocation, environ)
    if allocation.is_on_first_node:
        facts = {**facts, first: here}
    return choose_fabric(facts, allocation.node_names, preferred) if first in facts else _by_name(first)


def _ask_all(allocation: Allocation, environ: Mapping[str, str]) -> Mapping[str, Sequence[Interface]]:
    """Return the interfaces of every node that answers; log which do not, as the choice is made without them."""
    command = [sys.executable, "-m", "ddp_hpc.cluster.rendezvous.interfaces"]
    answers = ask_nodes(command, allocation.node_names, environ=environ, timeout_s=PROBE_TIMEOUT_S)
    if answers.silent:
        why = f" ({answers.last_error})" if answers.last_error else ""
        sys.stderr.write(
            f"note: {', '.join(answers.silent)} did not answer which networks they have{why}; ddp-hpc chooses the address of rank "
            "zero without them. If the ranks then cannot connect, set MASTER_ADDR.\n"
        )
    return {node: parse_interfaces(plain) for node, plain in answers.by_node.items()}


def _by_name(first: str) -> Choice:
    """Resolve the name of rank zero's node, where the node itself did not answer."""
    address = this_host().address_of(first)
    if address is not None:
        rule = "the address that this host resolves its name to, because the node did not answer"
        return Choice(interface=first, address=address, rule=rule)
    raise WorkerError(
        f"{first}, the node of rank zero, did not answer which networks it has, and this host resolves its name to no address "
        f"that other nodes can reach. Set MASTER_ADDR to an IP address of {first}, or submit again."
    )
