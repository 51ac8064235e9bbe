"""How fast a link between two nodes is, and how far apart their clocks are: what one connection of a probe measures.

The node that connects sends bytes until the other has all of them. It also asks four times what the time is there: the answer with the
shortest round trip counts, and is wrong by at most half of that.
"""

from __future__ import annotations

import socket
import struct
import time

NUM_QUESTIONS = 4
NUM_STREAMS = 16
"""The fastest counts: a busy node slows some of them down, a slow network all."""
STREAM_BYTES = 1 << 20
STREAM_S = 0.5
"""After how long a stream ends early; a slow link has shown its speed by then."""
ALL_STREAMS_S = 1.5
"""After how long no other stream begins."""
CALL_TIMEOUT_S = 4.0
"""How long a single call may wait for the other node."""
_CHUNK = bytes(1 << 16)
_BUFFER = 1 << 18
_TIME, _SIZE = struct.Struct("!d"), struct.Struct("!I")


def measure(link: socket.socket) -> tuple[float, float, float]:
    """Measure over a connection whose other end runs `answer_measurements`: MB/s, by how many seconds its clock is ahead, seconds of the round trip.

    An OSError means that it does not answer in time.
    """
    link.settimeout(CALL_TIMEOUT_S)
    # What waits in a large buffer of this end has not passed the network yet.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    trips = []
    for _ in range(NUM_QUESTIONS):
        asked, began = time.time(), time.monotonic()
        link.sendall(b"?")
        (there,) = _TIME.unpack(receive_exactly(link, _TIME.size))
        trip = time.monotonic() - began
        trips.append((trip, there - (asked + trip / 2)))
    trip, ahead = min(trips)
    began, rates = time.monotonic(), [_stream(link)]
    while len(rates) < NUM_STREAMS and time.monotonic() < began + ALL_STREAMS_S:
        rates.append(_stream(link))
    return round(max(rates), 2), round(ahead, 4), round(trip, 6)


def _stream(link: socket.socket) -> float:
    """Send a stream; return how fast it arrived, in MB/s."""
    began, num_bytes = time.monotonic(), 0
    while num_bytes < STREAM_BYTES and time.monotonic() < began + STREAM_S:
        link.sendall(_SIZE.pack(len(_CHUNK)))
        link.sendall(_CHUNK)
        num_bytes += len(_CHUNK)
    link.sendall(_SIZE.pack(0))
    receive_exactly(link, 1)
    return num_bytes / 1e6 / max(time.monotonic() - began, 1e-6)


def answer_measurements(link: socket.socket) -> None:
    """Answer a node that measures, until it closes the connection."""
    link.settimeout(CALL_TIMEOUT_S)
    for _ in range(NUM_QUESTIONS):
        receive_exactly(link, 1)
        link.sendall(_TIME.pack(time.time()))
    while True:
        (size,) = _SIZE.unpack(receive_exactly(link, _SIZE.size))
        if size > len(_CHUNK):
            raise ConnectionAbortedError("the other end sends something else")
        if size:
            receive_exactly(link, size)
        else:
            link.sendall(b"!")


def receive_exactly(link: socket.socket, num_bytes: int, seconds: float | None = None) -> bytes:
    """Return exactly so many bytes, all of which must come within `seconds`, or each part of them within the link's timeout."""
    deadline, parts, missing = time.monotonic() + (seconds or 0.0), [], num_bytes
    while missing:
        if seconds is not None:
            link.settimeout(max(deadline - time.monotonic(), 0.001))
        part = link.recv(min(missing, 1 << 16))
        if not part:
            raise ConnectionResetError("the other end closed the connection")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
