"""The ways in which a rank ends, for a recipe and for a script: each a function without arguments. It is copied beside both."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import torch


class InjectedError(Exception):
    """Raised in the main thread by another thread."""


def _raise() -> None:
    raise KeyError("no such key")


def _decoy() -> None:
    sys.stdout.write("warning: CUDA out of memory. Tried to allocate 2 GiB, retrying with a smaller batch\n")
    sys.stdout.write("RuntimeError: Connection closed by peer (ignored)\n")
    raise ArithmeticError("the mask is empty")


def _raise_by_thread() -> None:
    main = threading.main_thread().ident

    def raise_there() -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(InjectedError))

    threading.Thread(target=raise_there).start()
    while True:
        time.sleep(0.01)


def _raise_by_signal() -> None:
    def handler(*_: object) -> None:
        raise TimeoutError("the step took too long")

    signal.signal(signal.SIGALRM, handler)
    signal.alarm(1)
    time.sleep(1000)


def _hold_gil() -> None:
    ctypes.PyDLL(None).sleep(1000)


def _fill_disk() -> None:
    with Path(os.environ["SMALL_DISK"], "big.bin").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def _fill_address_space() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    torch.zeros(1 << 40)


def _fill_memory() -> None:
    taken = []
    while True:
        taken.append(torch.ones(1 << 24))


def _bind_twice() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        socket.create_server(taken.getsockname())


def _caught() -> None:
    try:
        Path("/no/such/file").read_bytes()
    except OSError:
        traceback.print_exc()
    sys.stderr.write("using the default instead\n")
    sys.stderr.flush()
    os._exit(1)


def _signal(number: int) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)
        time.sleep(1000)

    return send


ENDS: Mapping[str, Callable[[], object]] = {
    "exception": _raise,
    "decoy": _decoy,
    "thread-exception": _raise_by_thread,
    "signal-exception": _raise_by_signal,
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "gil": _hold_gil,
    "sigint": _signal(signal.SIGINT),
    "sigkill": _signal(signal.SIGKILL),
    "sigterm": _signal(signal.SIGTERM),
    "sigstop": _signal(signal.SIGSTOP),
    "exit": lambda: sys.exit(3),
    "caught": _caught,
    "import": lambda: import_module("no_such_module"),
    "disk": _fill_disk,
    "memory": _fill_address_space,
    "cgroup": _fill_memory,
    "port": _bind_twice,
    "dns": lambda: socket.getaddrinfo("no-such-host.invalid", 80),
    "hang": lambda: time.sleep(1000),
}
