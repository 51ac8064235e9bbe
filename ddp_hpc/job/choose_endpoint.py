"""Where the ranks of a job meet: the fastest network that all its nodes share, and a port that is free there.

The batch host decides before it starts any worker, so that each launcher can pass the endpoint on a command line. Ranks of
one node meet on loopback. If the batch host has only one network, it knows enough; else it asks every node once, by a short job step.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import msgspec

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cluster.rendezvous.address import find_address, this_host
from ddp_hpc.cluster.rendezvous.interfaces import Interface
from ddp_hpc.cluster.rendezvous.ports import candidate_ports, is_free
from ddp_hpc.cluster.slurm.allocation import Allocation
from ddp_hpc.job.wire.endpoint import Endpoint
from ddp_hpc.job.wire.subprocesses import ask_nodes

INTERFACES_TIMEOUT_S = 60.0
MOST_PORTS = 20
"""How many ports to try; if all are in use, something else is wrong."""


def endpoints_to_try(
    allocation: Allocation, *, attempt: int, environ: Mapping[str, str], preferred: Sequence[str] = ()
) -> Iterator[Endpoint]:
    """Yield endpoints, the best first; the user's own MASTER_ADDR and MASTER_PORT win, then `preferred` interfaces."""
    address, why = rank0_addr(allocation, environ=environ, preferred=preferred)
    for port in _candidate_ports(allocation, attempt, environ.get("MASTER_PORT")):
        if not allocation.is_on_first_node or is_free(address, port):
            sys.stderr.write(f"ranks meet at {address} port {port}: {why}\n")
            yield Endpoint(address, port, why)


def rank0_addr(allocation: Allocation, *, environ: Mapping[str, str], preferred: Sequence[str] = ()) -> tuple[str, str]:
    """Return the address of rank zero's node at which the ranks meet, and why it is this one; raise as `endpoints_to_try` does."""
    host, given = this_host(), environ.get("MASTER_ADDR")
    if not given:
        found = find_address(allocation, host, preferred=preferred, ask=partial(_ask_interfaces, allocation, environ))
        refused = "; ".join(f"not {name}: {reason}" for name, reason in found.refused.items())
        return str(found.value), f"{found.rule}{refused and f' ({refused})'}"
    is_one_node = len(allocation.node_names) == 1
    address = host.numeric_address(given, may_be_loopback=is_one_node)
    if address is None or (ipaddress.ip_address(address).is_loopback and not is_one_node):
        raise ConfigError(
            f"MASTER_ADDR is {given!r} in the environment, but this node resolves it to no address that other nodes can "
            "reach. Set it to an IP address of the first node, or unset it to have one chosen."
        )
    return address, "from MASTER_ADDR in the environment"


def _candidate_ports(allocation: Allocation, attempt: int, given: str | None) -> Iterator[int]:
    """Return the ports to try: the user's own, or those that belong to the job's number, others for each attempt."""
    if not given:
        return islice(candidate_ports(allocation.job_id, attempt), MOST_PORTS)
    if not given.isdecimal() or not 0 < int(given) < 2**16:
        raise ConfigError(
            f"MASTER_PORT is {given!r} in the environment, but it must be a port: 1 to 65535. Unset it to have one chosen."
        )
    return iter([int(given)])


def _ask_interfaces(allocation: Allocation, environ: Mapping[str, str]) -> Mapping[str, Sequence[Interface]]:
    """Return the interfaces of every node that answers; log which do not, as the choice is made without them."""
    command = [sys.executable, "-m", "ddp_hpc.cluster.rendezvous.interfaces"]
    answers = ask_nodes(command, allocation.node_names, environ=environ, timeout_s=INTERFACES_TIMEOUT_S)
    if answers.silent:
        why = f" ({answers.last_error})" if answers.last_error else ""
        sys.stderr.write(
            f"note: {', '.join(answers.silent)} did not answer which networks they have{why}; ddp-hpc chooses the address of rank "
            "zero without them. If the ranks then cannot connect, set MASTER_ADDR.\n"
        )
    return {node: msgspec.convert(plain, tuple[Interface, ...]) for node, plain in answers.by_node.items()}
