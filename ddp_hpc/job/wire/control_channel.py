"""The connection between a supervisor and its agents: orders one way, reports the other, one JSON object a line.

It is the agents' standard input and output. srun carries both to every node and back, so there is no port to open, no
address to find and no firewall to pass; and when the supervisor or srun has exited, each agent reads end of file. What
agents and workers print goes to standard error instead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ddp_hpc.base import processes

_CHUNK_BYTES = 1 << 16


class ControlChannel:
    """One end of the connection: reading returns whole objects and never waits; each object is one write(2).

    With `wakes`, input wakes `processes.await_signal`; a process that does not block SIGIO would be killed by it.
    """

    def __init__(self, read_fd: int, write_fd: int, *, wakes: bool = True) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._rest = b""
        self.is_closed = False
        """Whether the other end has closed the connection."""
        if wakes:
            processes.wake_on_input(read_fd)
        else:
            os.set_blocking(read_fd, False)

    @classmethod
    def of_agent(cls) -> ControlChannel:
        """Return an agent's end; from here on, what is printed goes to standard error."""
        # Users' code and libraries print to descriptors 0 to 2, which children inherit. So the pipes move to new descriptors,
        # which exec closes, and 1 becomes a copy of 2 (dup(2)).
        read_fd, write_fd = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        with suppress(OSError):
            os.write(write_fd, b"\n")  # a TaskProlog may have begun a line here and not ended it
        return cls(read_fd, write_fd)

    def send(self, **message: Any) -> None:
        """Send an object; it is lost if the other end has exited."""
        with suppress(BrokenPipeError):
            os.write(self._write_fd, json.dumps(message).encode() + b"\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the objects that have come; call when `processes.await_signal` returns, and once before."""
        while not self.is_closed:
            try:
                chunk = os.read(self._read_fd, _CHUNK_BYTES)
            except BlockingIOError:
                return
            self.is_closed = not chunk
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                with suppress(ValueError):  # not ours: another program has printed to this pipe
                    message = json.loads(line)
                    if isinstance(message, dict):
                        yield message

    def close(self) -> None:
        """Close this end; an agent at the other end reads end of file, and exits."""
        with suppress(OSError):
            os.close(self._write_fd)
        with suppress(OSError):
            os.close(self._read_fd)
