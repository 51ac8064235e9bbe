"""The one child of a supervisor: started, told to stop, waited for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence

from ddp_hpc import processes


def see_through(argv: Sequence[str], lock_fd: int, *, on_stop: Callable[[int, int], object]) -> int:
    """Run a command to its end; return its exit code.

    `on_stop` is called with the child's pid and the number of each stop signal that arrives. The child holds the run's
    lock too.
    """
    child = subprocess.Popen(argv, pass_fds=[lock_fd], stdin=subprocess.DEVNULL)
    while True:
        number = processes.await_signal(3600.0)
        if number in processes.STOP_SIGNALS:
            on_stop(child.pid, number)
        code = child.poll()
        if code is not None:
            return code


def answer_of(argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float) -> str | None:
    """Run a short command; return what it printed, or None where it failed or took too long."""
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
