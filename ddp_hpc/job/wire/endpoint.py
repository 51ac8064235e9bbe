"""The endpoint where the ranks of an attempt meet: an address and a port."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass, field

_BACKLOG = 4096
"""All ranks may connect before rank zero accepts; the kernel lowers it to net.core.somaxconn (listen(2))."""


class PortTakenError(Exception):
    """Another process listens at the address and port."""


@dataclass(frozen=True)
class Endpoint:
    """Where the ranks of an attempt meet."""

    address: str
    """Of rank zero's node: numeric, so that no rank needs a name server."""
    port: int
    why: str = field(default="", compare=False)
    """Why there: the network, and the rule that chose it; empty where it was read from another process."""

    def __str__(self) -> str:
        return f"{self.address} {self.port}"

    @property
    def netloc(self) -> str:
        """As URLs have it, and torchrun."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read what `str` wrote."""
        address, _, port = text.partition(" ")
        return cls(address, int(port))


def listen(endpoint: Endpoint) -> socket.socket:
    """Return a socket that listens on this address only; for port 0, the kernel chooses a free port.

    Raises:
        PortTakenError: where the port is taken.
    """
    is_v6 = ipaddress.ip_address(endpoint.address).version == 6
    try:
        return socket.create_server(
            (endpoint.address, endpoint.port), family=socket.AF_INET6 if is_v6 else socket.AF_INET, backlog=_BACKLOG
        )
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(str(endpoint)) from error
        raise
