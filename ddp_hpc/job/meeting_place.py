"""Where the ranks of a job meet: the fastest network that all its nodes share, and a port that is free there.

The batch host decides before it starts anything, so that each launcher can say it on a command line. Where it has one
network only, or the job one node, it has all the facts; else it asks every node once, by a short step of its own.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from ddp_hpc.errors import ConfigError, WorkerError
from ddp_hpc.job.children import ask_nodes
from ddp_hpc.job.meeting import Meeting
from ddp_hpc.rendezvous.address import addresses_of
from ddp_hpc.rendezvous.choice import Choice, choose_fabric, is_routable, refusal
from ddp_hpc.rendezvous.interfaces import Interface, local_interfaces, parse_interfaces
from ddp_hpc.rendezvous.ports import candidate_ports, is_free
from ddp_hpc.slurm.allocation import Allocation

PROBE_TIMEOUT_S = 60.0
MOST_PORTS = 20
"""How many ports to try before we believe that something else is wrong."""


def meetings(
    allocation: Allocation, *, attempt: int, environ: Mapping[str, str], preferred: Sequence[str] = ()
) -> Iterator[Meeting]:
    """Yield places to meet, the best first; the user's own MASTER_ADDR and MASTER_PORT win, then `preferred` interfaces.

    Raises:
        ConfigError: where rank zero's node has no network, or a port the user named is no number.
        WorkerError: where nobody knows an address of rank zero's node.
    """
    given = environ.get("MASTER_ADDR")
    if given:
        address, why = _numeric(given), "as MASTER_ADDR says"
    else:
        address, why = _explained(_choice(allocation, environ, preferred))
    for port in _ports(allocation, attempt, environ.get("MASTER_PORT")):
        if not allocation.is_on_first_node or is_free(address, port):
            sys.stderr.write(f"ranks meet at {address} port {port}: {why}\n")
            yield Meeting(address, port)


def _ports(allocation: Allocation, attempt: int, given: str | None) -> Iterator[int]:
    if given:
        return iter([_number(given)])
    return islice(candidate_ports(allocation.job_id, attempt), MOST_PORTS)


def _numeric(text: str) -> str:
    """Return the address that the user's word means to other nodes: a node's own name may mean 127.0.1.1 to itself."""
    for address in addresses_of(text):
        if not ipaddress.ip_address(address).is_loopback:
            return address
    raise ConfigError(
        f"MASTER_ADDR is {text!r} in the environment, but that means no address here that other nodes reach. "
        "Set it to an IP address of the first node, or unset it to have one chosen."
    )


def _number(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**16:
        raise ConfigError(f"MASTER_PORT is {text!r} in the environment, but it must be a port: 1 to 65535. Unset it.")
    return int(text)


def _choice(allocation: Allocation, environ: Mapping[str, str], preferred: Sequence[str]) -> Choice:
    """Choose among the networks that rank zero's node is on, by what all nodes say where that matters."""
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
    """Return the interfaces of every node that answers; say which do not, for the choice is made without them."""
    command = [sys.executable, "-m", "ddp_hpc.rendezvous.interfaces"]
    told = ask_nodes(command, allocation.node_names, environ=environ, timeout_s=PROBE_TIMEOUT_S)
    if told.silent:
        why = f" ({told.said})" if told.said else ""
        sys.stderr.write(
            f"note: {', '.join(told.silent)} did not say which networks there are{why}; the choice is made without\n"
        )
    return {node: parse_interfaces(plain) for node, plain in told.by_node.items()}


def _by_name(first: str) -> Choice:
    """Take what rank zero's node is called, where neither it nor this host can tell its networks."""
    for address in addresses_of(first):
        if is_routable(ipaddress.ip_address(address.partition("%")[0])):
            return Choice(interface=first, address=address, rule="what its name means here: it did not answer itself")
    raise WorkerError(
        f"{first} did not say which networks it has, and its name means no address here that other nodes reach. "
        "Set MASTER_ADDR to an address of it, or submit again."
    )


def _explained(choice: Choice) -> tuple[str, str]:
    """Return the address, and what the job's log says once about why."""
    refused = "; ".join(f"not {one.name}: {one.why}" for one in choice.refused)
    return choice.address, f"{choice.interface}, {choice.rule}{refused and f' ({refused})'}"
