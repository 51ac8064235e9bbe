"""Candidate ports for rank zero: computed from the job id, so all processes of a job agree, and other jobs use others."""

from __future__ import annotations

import errno
import math
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

EPHEMERAL_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 10_000
"""Ports of well-known services are below it."""
MOST_TRIES = 100
_USUAL_EPHEMERAL_LOW = 32_768
_FEWEST_PORTS = 1_000
"""If fewer ports than this lie below the ephemeral range, the usual range counts, and a port may be taken."""
_STRIDE = 1_009


def ephemeral_low() -> int:
    """Return the lowest port that the kernel assigns to outgoing connections (ip(7), ip_local_port_range)."""
    try:
        return int(EPHEMERAL_RANGE_FILE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL_LOW


def candidate_ports(job_id: str, attempt: int = 0, low: int | None = None) -> Iterator[int]:
    """Yield every usable port, in an order that depends on the job id; later attempts begin at other ports.

    `low` is the lowest ephemeral port; by default, this host's.
    """
    ceiling = ephemeral_low() if low is None else low
    if ceiling < LOWEST_PORT + _FEWEST_PORTS:
        ceiling = _USUAL_EPHEMERAL_LOW
    num_ports = ceiling - LOWEST_PORT
    # Jobs with adjacent ids begin at adjacent ports, and continue in large strides, so that their first tries differ. A
    # stride that has no divisor in common with the number of ports comes by all of them.
    stride = next(stride for stride in range(_STRIDE, 2 * _STRIDE) if math.gcd(stride, num_ports) == 1)
    first = int(job_id) if job_id.isdecimal() else zlib.crc32(job_id.encode())
    # Not at 10000 and the job's number itself: many scripts take that for a MASTER_PORT of their own, in the same job.
    for turn in range(1, num_ports + 1):
        yield LOWEST_PORT + (first + (attempt + turn) * stride) % num_ports


def is_free(address: str, port: int) -> bool:
    """Return whether no process on this host uses the port; True also if this host cannot tell."""
    try:
        ((family, kind, protocol, _, place), *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as attempt:
            # Otherwise connections of an earlier attempt in TIME_WAIT would count for a minute:
            # https://man7.org/linux/man-pages/man7/socket.7.html
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(place)
    except OSError as error:
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True
