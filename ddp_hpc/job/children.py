"""The commands that a supervisor starts."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence


def start(argv: Sequence[str], lock_fds: Sequence[int], *, on_line: bool = False) -> subprocess.Popen[bytes]:
    """Start a command that holds the run's lock too; `on_line`, its input and output are ours."""
    pipe = subprocess.PIPE if on_line else None
    return subprocess.Popen(argv, pass_fds=lock_fds, stdin=pipe or subprocess.DEVNULL, stdout=pipe)


def answer_of(
    argv: Sequence[str], *, environ: Mapping[str, str], timeout_s: float, is_failure_told: bool = False
) -> str | None:
    """Run a short command; return what it printed, or None where it took too long, or failed and does not tell of it."""
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 or is_failure_told else None
