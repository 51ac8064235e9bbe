"""Text on a terminal: control characters in exceptions, log lines, names and Slurm's answers are shown, not executed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ddp_hpc.base.discretion import escape_controls


class GuardedTerminal(io.TextIOWrapper):
    """A stream to a terminal that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
        self.stream = stream
        """The unguarded terminal, for code that draws on it."""

    def write(self, text: str, /) -> int:
        super().write(escape_controls(text))
        return len(text)


@contextmanager
def guarded_terminal() -> Iterator[None]:
    r"""Guard standard output and errors where they are a terminal; what goes to a file or pipe keeps every byte.

    What a stream's encoding does not know is written as `\u4e16`, rather than ending the command.
    """
    before = sys.stdout, sys.stderr
    guarded = [_guard(stream) for stream in before]
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in guarded:
            if isinstance(stream, GuardedTerminal):
                stream.detach()  # which flushes; else it would close the terminal with itself


def open_closed_streams() -> None:
    """Have standard input, output and errors be /dev/null where the parent process has closed them."""
    # Else Python has None for them, and the next file that is opened gets their numbers: what a child prints would go into it.
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null == number:
                os.set_inheritable(number, True)  # dup2(2) of a descriptor to itself does nothing
            else:
                os.dup2(null, number, inheritable=True)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode))


def drop_output() -> None:
    """Throw away what waits to be written to standard output; else the interpreter would fail when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _guard(stream: TextIO | None) -> Any:
    if stream is not None and stream.isatty() and hasattr(stream, "buffer"):
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the live screen draws on it as it is
        return GuardedTerminal(stream)
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")
    return stream


def unguarded_stream(out: TextIO) -> TextIO:
    """Return the unguarded terminal, for a caller that escapes control characters itself."""
    return out.stream if isinstance(out, GuardedTerminal) else out
