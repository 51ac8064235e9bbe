"""Running the machine's own tools, which either succeed or say why not."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LabError(Exception):
    """The lab cannot do what it was asked."""


def attempt(*argv: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; failing is an answer."""
    # Debian's directories of tools for root come first: no `ip` or `mount` from a user's environment.
    env = {**os.environ, "PATH": PATH, **(env or {})}
    return subprocess.run([str(word) for word in argv], env=env, capture_output=True, text=True, check=False)


def sh(*argv: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command that must succeed; return its output."""
    done = attempt(*argv, env=env)
    if done.returncode:
        command = " ".join(str(word) for word in argv)
        raise LabError(f"`{command}` ended with {done.returncode}:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def wait_for(what: str, condition: Callable[[], T], timeout_s: float, *, pause_s: float = 0.05) -> T:
    """Return the first true value of `condition`."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise LabError(f"waited {timeout_s:g} s for {what}, in vain")
        time.sleep(pause_s)


def read(path: str | Path) -> str:
    """Return a file's text, or nothing where there is no such file."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def is_alive(pid: int, start: str) -> bool:
    """Say whether a process runs, is no zombie, and is the one that started then."""
    fields = _stat(pid)
    return bool(fields) and fields[0] != "Z" and fields[19] == start


def start_of(pid: int) -> str:
    """Return when a process started, which with its id names it forever."""
    fields = _stat(pid)
    if not fields:
        raise LabError(f"process {pid} is gone")
    return fields[19]


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; none if there is no such process."""
    return read(f"/proc/{pid}/stat").rpartition(")")[2].split()
