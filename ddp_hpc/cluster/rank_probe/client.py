"""Asks a rank's worker server; free of PyTorch. What does not answer in time is not known, which is an error of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import struct
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ANSWER_S = 2.0
NCCL_ANSWER_S = 1.0
MOST_BYTES = 16 << 20
"""The largest answer that is read; a flight record of 2,000 entries has about 1 MB."""
_CHUNK = 1 << 16
_UCRED_STRUCT = struct.Struct("3i")


class NoAnswerError(Exception):
    """A rank did not answer; the text says how."""

    def __init__(self, text: str, *, pid: int | None = None) -> None:
        super().__init__(text)
        self.pid = pid
        """Its process, where there is one that holds the socket: it exists and does not answer."""


class NoHandlerError(NoAnswerError):
    """This PyTorch does not know the question."""


def pid_and_uid(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the process that began to listen (SO_PEERCRED, unix(7)); 0 is one in another namespace."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED_STRUCT.size)
    pid, uid, _ = _UCRED_STRUCT.unpack(packed)
    return pid, uid


@dataclass(frozen=True, kw_only=True)
class RankProbe:
    """One rank's worker server, at the socket `path`. Each method raises `NoAnswerError` where the answer does not come, or is not what was asked."""

    path: Path
    answer_s: float = ANSWER_S
    """How long to wait for one answer."""
    most_bytes: int = MOST_BYTES

    def ping(self) -> int:
        """Return the process id of the rank. It answers also while another thread holds the interpreter (GIL)."""
        pid, answer = self._ask("ping")
        if answer != b"pong":
            raise NoAnswerError(f"{self.path.name} answers a ping with {answer[:40]!r}", pid=pid)
        return pid

    def stacks(self) -> str:
        """Return the Python stacks of all threads; a process in which a thread holds the interpreter (GIL) gives none."""
        return self._ask("dump_traceback")[1].decode(errors="replace")

    def flight_record(self) -> dict[str, Any]:
        """Return the newest collectives, oldest first, as `entries`, and the process groups as `pg_config` and `pg_status`.

        They are those of gloo: NCCL keeps a record of its own.
        """
        return self._object("fr_trace_json")

    def nccl_flight_record(self) -> dict[str, Any]:
        """Return the same of NCCL. Ask only a process that is to be killed.

        PyTorch then asks CUDA for the state of each open collective, which may not return where CUDA hangs, and may break
        the capture of a CUDA graph.
        """
        return RankProbe._object(replace(self, answer_s=min(self.answer_s, NCCL_ANSWER_S)), "dump_nccl_trace_json")

    def flight_record_text(self) -> bytes:
        """Return the same as text; it is large, and its reader may want little of it."""
        return self._ask("fr_trace_json")[1]

    def _object(self, handler: str) -> dict[str, Any]:
        pid, text = self._ask(handler)
        try:
            # By `backslashreplace`: a name in a record may be no UTF-8, and the record is still of use.
            answer = json.loads(text.decode(errors="backslashreplace"))
        except (ValueError, RecursionError) as error:
            raise NoAnswerError(f"the answer to {handler} is not JSON: {error}", pid=pid) from error
        if not isinstance(answer, dict):
            raise NoAnswerError(f"the answer to {handler} is not a JSON object", pid=pid)
        return answer

    def _ask(self, handler: str) -> tuple[int, bytes]:
        """Return the process id and the answer."""
        pid: int | None = None
        ends_at = time.monotonic() + self.answer_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self.answer_s)
                connection.connect(str(self.path))
                pid, uid = pid_and_uid(connection)
                if uid != os.getuid():
                    raise NoAnswerError(f"{self.path} belongs to another user (user id {uid})")
                return pid, self._read(connection, handler, ends_at)
        except TimeoutError as error:
            raise NoAnswerError(f"no answer to {handler} within {self.answer_s:g} s", pid=pid) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswerError(f"no answer to {handler}: {str(error) or type(error).__name__}", pid=pid) from error

    def _read(self, connection: socket.socket, handler: str, ends_at: float) -> bytes:
        with closing(http.client.HTTPConnection("localhost")) as http_connection:
            http_connection.sock = connection
            http_connection.request("POST", f"/handler/{handler}")
            response = http_connection.getresponse()
            parts: list[bytes] = []
            size = 0
            while part := response.read1(_CHUNK):
                parts.append(part)
                size += len(part)
                if size > self.most_bytes:
                    raise ValueError(f"it has more than {self.most_bytes} bytes")
                left_s = ends_at - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                connection.settimeout(left_s)
        if response.status == http.HTTPStatus.NOT_FOUND:
            raise NoHandlerError(f"no answer to {handler}: status 404 (this PyTorch may not have it)")
        if response.status != http.HTTPStatus.OK:
            raise ValueError(f"status {response.status}")
        return b"".join(parts)
