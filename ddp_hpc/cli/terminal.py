"""Text on a terminal: control characters in exceptions, log lines, names and Slurm's answers are shown, not executed."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters (C0 without tab and line feed, and C1), and characters that change the direction of text."""


def visible(text: str) -> str:
    r"""Return text without colours, and with every other control character as `\x1b`."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], _COLOURS.sub("", text))


class Terminal(io.TextIOWrapper):
    """A stream to a terminal that escapes control characters."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True)
        self.stream = stream
        """The unguarded terminal, for code that draws on it."""

    def write(self, text: str, /) -> int:
        super().write(visible(text))
        return len(text)


@contextmanager
def guarded_terminal() -> Iterator[None]:
    r"""Guard standard output and errors where they are a terminal; what goes to a file or pipe keeps every byte.

    What a stream's encoding does not know is written as `\u4e16`, rather than ending the command.
    """
    before = sys.stdout, sys.stderr
    guarded = [_guarded(stream) for stream in before]
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in guarded:
            if isinstance(stream, Terminal):
                stream.detach()  # which flushes; else it would close the terminal with itself


def _guarded(stream: TextIO | None) -> Any:
    if stream is not None and stream.isatty() and hasattr(stream, "buffer"):
        stream.flush()
        return Terminal(stream)
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")
    return stream


def unguarded(out: TextIO) -> TextIO:
    """Return the unguarded terminal, for a caller that escapes control characters itself."""
    return out.stream if isinstance(out, Terminal) else out
