"""Runs the user's command for an event of a run, for a limited time, beside the supervisor.

    python -m ddp_hpc.job.notifier COMMAND ...

A process of its own, so that the supervisor waits for nothing: it says on its standard error, the run's log, what went wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from ddp_hpc.base import processes

TIMEOUT_S = 30.0
"""How long the command may take."""


def main(argv: Sequence[str]) -> int:
    """Run the command; kill it, and what it has started, when its time is over."""
    processes.adopt_orphans()
    try:
        command = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=processes.unblock_signals)  # noqa: PLW1509  there are no threads here
    except OSError as error:
        return _print_failure(f"{argv[0]!r} cannot be started: {error.strerror}. Correct the key")
    try:
        code = command.wait(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        processes.kill([command.pid])
        with suppress(ImportError):
            import psutil  # late: few commands take so long

            processes.kill(child.pid for child in psutil.Process(os.getpid()).children(recursive=True))
        return _print_failure(f"{argv[0]!r} did not end within {TIMEOUT_S:g} s, so it was killed")
    return _print_failure(f"{argv[0]!r} exited with code {code}") if code else 0


def _print_failure(how: str) -> int:
    sys.stderr.write(f"note: `notify.command`: {how}; the run is not affected\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
