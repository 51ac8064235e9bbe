"""Runs work that may wait for a shared file system beside its caller, who never waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ddp_hpc.base.processes import die_with_parent

Work = Callable[[], object]


def in_thread(work: Work) -> None:
    """Do it in a thread. A process that forks later must not have one."""
    threading.Thread(target=work, name="ddp-hpc-hang-record", daemon=True).start()


def in_child(work: Work) -> None:
    """Do it in a forked process, which ends with this one; the caller has no other thread, and reaps its children."""
    parent = os.getpid()
    with suppress(OSError):  # no process can be made: then the report of the hang has what the logs say
        if os.fork() == 0:
            with suppress(BaseException):
                die_with_parent(parent)
                # Whoever reads what the parent prints must see its end, also while this process waits for a file system.
                nothing = os.open(os.devnull, os.O_RDWR)
                os.dup2(nothing, 0)
                os.dup2(nothing, 1)
                work()
            os._exit(0)
