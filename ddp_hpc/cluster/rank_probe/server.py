"""Starts PyTorch's worker server in a rank: a thread of C++ that answers questions about this process on a unix socket."""

from __future__ import annotations

import ctypes
import os
import socket as sockets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from ddp_hpc.base.processes import all_signals_blocked
from ddp_hpc.base.thread_room import ThreadRoom, thread_room
from ddp_hpc.cluster.rank_probe.client import pid_and_uid

_FEWEST_THREADS = 8
_SAFETY_FACTOR = 4
"""How many times the server's threads must have room: others are started at the same moment, by these ranks and by other jobs."""
_SPARE_THREADS = 256
"""How many threads a training itself may need in each rank: of loaders, OpenMP, NCCL, CUDA and the compiler."""
_ERROR_LOG_LEVEL = 2
"""PyTorch's number for the level ERROR; what the server prints at its start has the level WARNING."""
_started_servers: list[tuple[int, Path]] = []
"""Process ids and sockets of the servers that were started: a fork has a copy of this list, and of no thread."""


def serve(socket: Path, *, num_ranks: int = 1, room: ThreadRoom | None = None) -> str:
    """Let this process answer at `socket`; return why it cannot, or an empty text. PyTorch has been imported before.

    The directory of the socket must be one that only this user can enter. `num_ranks` is how many processes of this node do so;
    `room` is what the node's limits leave, by default what they say.
    """
    if (os.getpid(), socket) in _started_servers:
        return ""
    if "torch" not in sys.modules:
        return "PyTorch is not imported"
    try:
        c10d = import_module("torch._C._distributed_c10d")  # by its name, because only `train` may import PyTorch
        server = getattr(c10d, "_WorkerServer", None)
        if server is None:
            return f"PyTorch {sys.modules['torch'].__version__} has no worker server"
        taken = f"another process answers at {socket}" if is_taken(socket) else ""
        if why_not := taken or _why_no_threads(num_ranks, room or thread_room()):
            return why_not
        socket.unlink(missing_ok=True)  # of a process that was killed
        # Its threads take over the mask: no signal is ever delivered to one of them in place of the main thread.
        with all_signals_blocked(), _muted_torch_log():
            started = server(str(socket), -1)
        # It answers to the end of the process. A destructor would wait for threads, which a fork does not have.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(started))
        _started_servers.append((os.getpid(), socket))
    except Exception as error:  # noqa: BLE001  a training must not end because it cannot be asked
        return f"PyTorch's worker server did not start: {error}"
    return ""


def _why_no_threads(num_ranks: int, room: ThreadRoom | None) -> str:
    """Return why the server must not start; an empty text where there is room for many more threads than it needs.

    It starts one thread for each CPU of the node, and where one cannot be started, PyTorch ends the whole process.
    """
    num_threads = 1 + max(_FEWEST_THREADS, (os.cpu_count() or 1) - 1)
    needed = num_ranks * (_SAFETY_FACTOR * num_threads + _SPARE_THREADS)
    if room is None or room[0] >= needed:
        return ""
    return (
        f"{room[1]}, and ddp-hpc starts PyTorch's worker server only "
        f"where there is room for {needed} (it has {num_threads} threads, in each of {num_ranks} ranks)"
    )


def is_taken(socket: Path) -> bool:
    """Tell whether another process that runs has this socket; a fork of one that has ended may still hold it open."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM) as connection:
        connection.setblocking(False)  # a full queue says EAGAIN
        try:
            connection.connect(str(socket))
        except BlockingIOError:
            return True
        except OSError:
            return False
        pid, _ = pid_and_uid(connection)
    return pid != os.getpid() and (pid == 0 or Path(f"/proc/{pid}").exists())


def serve_at_rendezvous(
    socket: Path, *, num_ranks: int = 1, on_refusal: Callable[[str], object] = lambda _: None
) -> str:
    """Let this process answer from the moment at which it meets the other ranks; return why it cannot, or an empty text.

    A script that forks before, or never meets others, has no thread that it has not started itself: Python 3.12 warns of a fork
    beside threads. PyTorch starts threads of its own when ranks meet. `on_refusal` is called there
    with the reason why it does not answer.
    """
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", None)
    if not isinstance(handlers, dict):
        return "this PyTorch has no table of rendezvous handlers"
    owner, begun = os.getpid(), list[str]()

    def answering(handler: Callable[..., object]) -> Callable[..., object]:
        def meet(*args: object, **options: object) -> object:
            # A process that the script forks has these handlers, too, and is another rank or none.
            if os.getpid() == owner and not begun:
                begun.append(serve(socket, num_ranks=num_ranks))
                if begun[0]:
                    on_refusal(begun[0])
            return handler(*args, **options)

        return meet

    handlers.update({scheme: answering(handler) for scheme, handler in handlers.items()})
    return ""


@contextmanager
def _muted_torch_log() -> Iterator[None]:
    """Leave out what PyTorch's C++ code prints meanwhile below the level ERROR.

    Descriptor 2 stays as it is: a child that another thread of a script starts in this moment inherits it.
    """
    try:
        library = Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libc10.so"
        level = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # a PyTorch that is built otherwise: then it prints
        yield
        return
    before = level.value
    level.value = max(before, _ERROR_LOG_LEVEL)
    try:
        yield
    finally:
        level.value = before
