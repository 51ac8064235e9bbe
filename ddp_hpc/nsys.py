"""Nsight Systems: its commands, and how a rank that runs under it asks for the beginning and the end of a record.

`nsys launch` starts a rank's process with what traces it; `nsys start` and `nsys stop` begin and end the record in that session. So a
record covers chosen steps with a GPU and without, and the process stays the same before, meanwhile and after
(https://docs.nvidia.com/nsight-systems/UserGuide/, "Interactive CLI Command Sequences").
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTROL = "_DDP_HPC_NSYS_CONTROL"
"""Name of a variable with the socket (a file descriptor) by which a rank under nsys speaks to the process that has started nsys."""
WHY_NOT = "_DDP_HPC_NSYS_WHY_NOT"
"""Name of a variable that says why a rank that was to run under nsys runs without it."""
TRACE = "cuda,nvtx,osrt"
"""CUDA, NVTX ranges, and calls of the operating system's libraries: none needs rights on the kernel's counters (perf_event_paranoid)."""

BEGIN, END, BEGUN = b"begin", b"end", b"begun"
"""What the two ends of the socket say, each as one message; another answer than `BEGUN` is a reason."""
BEGIN_S = 30.0
"""How long `nsys start` may take, in seconds."""
_ANSWER_S = BEGIN_S + 15.0
"""How long a rank waits for an answer, in seconds: longer than its other end waits for nsys."""

_SHELL = 'echo started >"$1" || exit 1; to=$1; shift; "$@"; echo $? >"$to"'
"""What nsys starts: it tells the worker's exit code, which nsys may change, and that it was started at all."""


@dataclass(frozen=True)
class Profiler:
    """Which ranks run under nsys, and what nsys is called."""

    ranks: frozenset[int]
    command: str
    """Its name on the PATH, or its path."""

    def __str__(self) -> str:
        """Return it as an argument of a command line; `parse` reads it."""
        return f"{','.join(map(str, sorted(self.ranks)))}:{self.command}"

    @classmethod
    def parse(cls, text: str) -> Profiler:
        """Return what `str` has written.

        Raises:
            ValueError: for any other text.
        """
        ranks, _, command = text.partition(":")
        return cls(frozenset(int(rank) for rank in ranks.split(",")), command)


@dataclass(frozen=True)
class Session:
    """One rank's session of nsys."""

    program: str
    name: str
    report: Path
    """Where the report goes, absolute, with its ending `.nsys-rep`."""

    def launch_argv(self, command: Sequence[str], report_code_to: str) -> list[str]:
        """Return the command that starts `command` in a new session and records nothing yet; it writes the exit code of `command` to a file."""
        options = [f"--session-new={self.name}", f"--trace={TRACE}", "--wait=primary"]
        return [self.program, "launch", *options, "/bin/sh", "-c", _SHELL, "sh", report_code_to, *command]

    def start_argv(self) -> list[str]:
        """Return the command that begins the record."""
        # nsys replaces %h, %p, %q{...} in a path, and writes `.nsys-rep` itself.
        output = str(self.report).removesuffix(".nsys-rep").replace("%", "%%")
        options = [f"--session={self.name}", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
        return [self.program, "start", *options, f"--output={output}.nsys-rep"]

    def stop_argv(self) -> list[str]:
        """Return the command that ends the record, writes the report, and lets the process run on."""
        return [self.program, "stop", f"--session={self.name}"]


class Capture:
    """The rank's end of the socket."""

    def __init__(self, control: socket.socket) -> None:
        control.settimeout(_ANSWER_S)
        self._control = control

    def begin(self) -> str:
        """Begin the record; return why that is not possible, or an empty text."""
        try:
            self._control.sendall(BEGIN)
            answer = self._control.recv(4096)
        except OSError as error:
            return f"nsys has not begun to record within {_ANSWER_S:.0f} s ({error})"
        return "" if answer == BEGUN else answer.decode(errors="replace") or "the process that has started nsys is gone"

    def end(self) -> None:
        """End the record, without waiting for its report.

        Raises:
            OSError: if nobody is there to do it.
        """
        self._control.sendall(END)

    def close(self) -> None:
        """Ask for nothing more."""
        self._control.close()


def capture_from(environ: Mapping[str, str]) -> Capture | str:
    """Return this process's way to begin and end a record, or why it does not run under nsys."""
    if CONTROL in environ:
        return Capture(socket.socket(fileno=int(environ[CONTROL])))
    return environ.get(WHY_NOT, "this rank was not started by nsys")
