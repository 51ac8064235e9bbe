"""Starts PyTorch's worker server in a rank: a thread of C++ that answers questions about this process on a unix socket."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

from ddp_hpc.base.processes import all_signals_blocked

_ITS_LOG = b"WorkerServer.cpp"
_answering: list[tuple[int, Path]] = []
"""Process ids and sockets of the servers that were started: a fork has a copy of this list, and of no thread."""


def serve(socket: Path) -> str:
    """Let this process answer at `socket`; return why it cannot, or an empty text. PyTorch has been imported before.

    The directory of the socket must be one that only this user can enter.
    """
    if (os.getpid(), socket) in _answering:
        return ""
    if "torch" not in sys.modules:
        return "PyTorch is not imported"
    try:
        c10d = import_module("torch._C._distributed_c10d")  # by its name, because only `train` may import PyTorch
        server = getattr(c10d, "_WorkerServer", None)
        if server is None:
            return f"PyTorch {sys.modules['torch'].__version__} has no worker server"
        socket.unlink(missing_ok=True)  # of a process that was killed
        # Its threads take over the mask: no signal is ever delivered to one of them in place of the main thread.
        with all_signals_blocked(), _without_its_log():
            started = server(str(socket), -1)
        # It answers to the end of the process. A destructor would wait for threads, which a fork does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(started))
        _answering.append((os.getpid(), socket))
    except Exception as error:  # noqa: BLE001  a training must not end because it cannot be asked
        return f"PyTorch's worker server did not start: {error}"
    return ""


def serve_at_rendezvous(socket: Path) -> str:
    """Let this process answer from the moment at which it meets the other ranks; return why it cannot, or an empty text.

    A script that forks before, or never meets others, has no thread that it has not started itself: Python 3.12 warns of a fork
    beside threads. PyTorch starts threads of its own when ranks meet.
    """
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    handlers = getattr(rendezvous, "_rendezvous_handlers", None)
    if not isinstance(handlers, dict):
        return "this PyTorch has no table of rendezvous handlers"
    owner, begun = os.getpid(), list[str]()

    def answering(handler: Callable[..., object]) -> Callable[..., object]:
        def meet(*args: object, **options: object) -> object:
            # A process that the script forks has these handlers, too, and is another rank or none.
            if os.getpid() == owner and not begun:
                begun.append(serve(socket))
            return handler(*args, **options)

        return meet

    handlers.update({scheme: answering(handler) for scheme, handler in handlers.items()})
    return ""


@contextmanager
def _without_its_log() -> Iterator[None]:
    """Leave out what the server prints at its start to standard error, and nothing else."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # a script may have closed it
            sys.stderr.flush()
    try:
        before = os.dup(2)
        caught = os.memfd_create("stderr")
    except OSError:  # too many open files, or no standard error: then it prints
        yield
        return
    try:
        os.dup2(caught, 2)
        yield
    finally:
        os.dup2(before, 2, inheritable=True)
        os.close(before)
        os.lseek(caught, 0, os.SEEK_SET)
        with suppress(OSError), os.fdopen(caught, "rb") as file:
            for line in file:
                if _ITS_LOG not in line:
                    os.write(2, line)
