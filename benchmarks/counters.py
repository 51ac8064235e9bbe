"""Count the instructions of this process, where the machine has a counter for them (perf_event_open(2)).

Other work on the machine changes times, but not how many instructions a loop takes. Many virtual machines have no counter.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from functools import cache
from typing import NamedTuple

_CALL_NUMBERS = {"x86_64": 298, "aarch64": 241}
"""Of the system call, for which the C library has no function."""
_ATTR_BYTES = 112
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HV = 1 << 1, 1 << 5, 1 << 6


class Event(NamedTuple):
    """What is counted, as `type` and `config` of `struct perf_event_attr`."""

    type: int
    config: int


INSTRUCTIONS = Event(0, 1)
"""PERF_TYPE_HARDWARE, PERF_COUNT_HW_INSTRUCTIONS."""
TASK_CLOCK = Event(1, 1)
"""PERF_TYPE_SOFTWARE, PERF_COUNT_SW_TASK_CLOCK: nanoseconds, which every machine counts."""


@cache
def counter(event: Event = INSTRUCTIONS) -> int | None:
    """Return the descriptor of a counter of this process and of threads that it starts from now on; None if there is none."""
    number = _CALL_NUMBERS.get(platform.machine())
    if number is None:
        return None
    flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HV
    attr = struct.pack("IIQQQQQ", event.type, _ATTR_BYTES, event.config, 0, 0, 0, flags).ljust(_ATTR_BYTES, b"\0")
    fd: int = ctypes.CDLL(None, use_errno=True).syscall(number, attr, 0, -1, -1, 0)
    return None if fd < 0 else fd


def count(event: Event = INSTRUCTIONS) -> int | None:
    """Return how many such events this process has had since the first call; None if the machine does not count them."""
    fd = counter(event)
    return None if fd is None else int.from_bytes(os.read(fd, 8), "little")
