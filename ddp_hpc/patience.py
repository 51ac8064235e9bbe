"""Asking a shared file system that may not answer for a while: what is known, what is not, and asking again.

A network file system answers with EIO, ESTALE, EACCES or ETIMEDOUT while a server restarts, a mount comes back, or a
ticket is renewed. That says nothing about the file. Only "no such file" is an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ddp_hpc.errors import UnreadableError

log = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""How long to ask again."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_ANSWERS = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that say what is there."""
_noted: set[Path] = set()
"""Paths that could not be looked at, and of which that is said: once, until they answer again."""

T = TypeVar("T")


def is_answer(error: OSError) -> bool:
    """Tell whether an error says what is there, rather than that nothing can be known now."""
    return isinstance(error, _ANSWERS)


def is_there(path: Path) -> bool:
    """Tell whether there is a file or directory; raise what does not say.

    `Path.exists` says no to that in some versions of Python.
    """
    try:
        path.stat()
    except OSError as error:
        if is_answer(error):
            return False
        raise
    return True


def patiently(
    what: str, ask: Callable[[], T], *, patience_s: float | None = None, on_wait: Callable[[], object] = lambda: None
) -> T:
    """Return what `ask` returns; ask again while the file system does not answer. `on_wait` is called before each try.

    Raises:
        UnreadableError: where it has not answered for `patience_s`.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    began, pause, num_failures = time.monotonic(), _FIRST_PAUSE_S, 0
    while True:
        on_wait()
        try:
            found = ask()
        except (OSError, UnreadableError) as error:
            told = str(error).rstrip(".")
            if isinstance(error, OSError) and is_answer(error):
                raise
            waited = time.monotonic() - began
            if waited + pause > patience_s:
                raise UnreadableError(
                    f"{what} cannot be read: {told}. It was tried for {waited:.0f} s. Nothing was changed; see that the "
                    "file system answers and that you may read there, and submit the run again if it does not go on by "
                    "itself."
                ) from error
            num_failures += 1
            if num_failures == 1:
                log.warning("%s cannot be read: %s. It is tried again for %.0f s.", what, told, patience_s)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        else:
            if num_failures:
                log.warning("%s was read after %.0f s, at try %d", what, time.monotonic() - began, num_failures + 1)
            return found


def known(path: Path, ask: Callable[[], T], unknown: T) -> T:
    """Return what `ask` returns of a path, or `unknown` where that cannot be known now; for looks that come again soon.

    The first look without an answer is logged, and the next only after one with an answer.
    """
    try:
        found = ask()
    except OSError as error:
        if path not in _noted:
            _noted.add(path)
            log.warning("%s cannot be looked at: %s. It is looked at again.", path, error)
        return unknown
    _noted.discard(path)
    return found
