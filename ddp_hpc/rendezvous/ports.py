"""Ports for ranks to meet at: the same for all who know the job, others for the jobs beside it."""

from __future__ import annotations

import errno
import math
import socket
import zlib
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000
"""Below it are the services one has heard of."""
MOST_TRIES = 100
_USUAL_EPHEMERAL_LOW = 32_768
_FEWEST = 1_000
"""With less room below the ephemeral ports, we take the usual range and a little risk."""
_STRIDE = 1_009


def ephemeral_low() -> int:
    """Return where the ports begin that the kernel hands out to any connection that goes out."""
    try:
        return int(EPHEMERAL_RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_EPHEMERAL_LOW


def candidate_ports(job_id: str, attempt: int = 0, low: int | None = None) -> Iterator[int]:
    """Yield every port that may be used, in an order of the job's own; later attempts begin further on.

    Jobs with adjacent numbers begin at adjacent ports, and go on in strides, so that they do not meet on their first
    tries. `low` is where the ephemeral ports begin: this host's, unless given.
    """
    ceiling = ephemeral_low() if low is None else low
    if ceiling < LOWEST + _FEWEST:
        ceiling = _USUAL_EPHEMERAL_LOW
    num_ports = ceiling - LOWEST
    stride = next(stride for stride in range(_STRIDE, 2 * _STRIDE) if math.gcd(stride, num_ports) == 1)
    first = int(job_id) if job_id.isdecimal() else zlib.crc32(job_id.encode())
    for turn in range(num_ports):
        yield LOWEST + (first + (attempt + turn) * stride) % num_ports


def is_free(address: str, port: int) -> bool:
    """Return whether nobody holds the port on this host; True also where that is not ours to tell.

    Connections that are closing do not count.
    """
    try:
        ((family, kind, protocol, _, place), *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, protocol) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(place)
    except OSError as error:
        return error.errno not in (errno.EADDRINUSE, errno.EACCES)
    return True


def first_free(address: str, candidates: Iterable[int]) -> int | None:
    """Return the first of the candidates that is free, or None after many that are not."""
    return next((port for port in islice(candidates, MOST_TRIES) if is_free(address, port)), None)
