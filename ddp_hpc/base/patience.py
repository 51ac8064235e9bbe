"""Use a shared file system that may fail for a while: tell a missing file from an unknown one, and try again.

A network file system returns EIO, ESTALE, EACCES or ETIMEDOUT while a server restarts, a mount recovers, or a Kerberos
ticket is renewed. Such an error says nothing about the file. Only "no such file" is an answer, and to a writer, a full disk.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from ddp_hpc.base.errors import NotARecordError, UnreadableError

PATIENCE_S = 60.0
"""How long to try again."""
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_ON_WAIT_INTERVAL_S = 1.0
"""How often `on_wait` is called at least during a pause."""
_ANSWER_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotARecordError)
"""Errors that are an answer: they say what exists at the path."""
_NO_ROOM_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""What only writers meet, and no pause heals."""
_warned_paths: set[Path] = set()
"""Paths for which a warning was logged that they cannot be read; removed once they can be read again."""

T = TypeVar("T")


def is_final_error(error: OSError) -> bool:
    """Tell whether an error says what exists at the path, rather than that the file system does not answer."""
    return isinstance(error, _ANSWER_ERRORS)


def is_there(path: Path) -> bool:
    """Tell whether a file or directory exists.

    Raises:
        OSError: if the file system does not say.
    """
    # Not by `Path.exists`, which some versions of Python have return False for every error:
    # https://docs.python.org/3/library/pathlib.html#pathlib.Path.exists
    try:
        path.stat()
    except OSError as error:
        if is_final_error(error):
            return False
        raise
    return True


def await_answer(
    what: str,
    ask: Callable[[], T],
    *,
    patience_s: float | None = None,
    on_wait: Callable[[], object] = lambda: None,
    done: Literal["read", "written"] = "read",
) -> T:
    """Return what `ask` returns; try again while the file system does not answer.

    `on_wait` is called before each try, and once a second during a pause. An error that it raises ends the wait. `done` says in
    messages what `ask` does.

    Raises:
        OSError: if that is an answer: no file there, or no room on the disk.
        UnreadableError: if the file system does not answer for `patience_s`.
    """
    patience_s = PATIENCE_S if patience_s is None else patience_s
    began, pause, num_failures = time.monotonic(), _FIRST_PAUSE_S, 0
    while True:
        on_wait()
        try:
            found = ask()
        except (OSError, UnreadableError) as error:
            detail = str(error).rstrip(".")
            if isinstance(error, OSError) and (is_final_error(error) or error.errno in _NO_ROOM_ERRNOS):
                raise
            waited = time.monotonic() - began
            if waited + pause > patience_s:
                raise UnreadableError(
                    f"{what} cannot be {done}: {detail}. ddp-hpc tried for {waited:.0f} s, and changed nothing. Check that "
                    f"the file system answers and that you have permission to {'read' if done == 'read' else 'write'} there. Then "
                    "run the command again, or submit the run again if it has stopped."
                ) from error
            num_failures += 1
            if num_failures == 1:
                logging.getLogger(__name__).warning(
                    "%s cannot be %s: %s. Trying again for %.0f s.", what, done, detail, patience_s
                )
            _sleep(pause, on_wait)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        else:
            if num_failures:
                logging.getLogger(__name__).warning(
                    "%s can be %s again, after %.0f s and %d tries; ddp-hpc continues",
                    what,
                    done,
                    time.monotonic() - began,
                    num_failures + 1,
                )
            return found


def _sleep(seconds: float, on_wait: Callable[[], object]) -> None:
    # A signal does not end a sleep: https://docs.python.org/3/library/time.html#time.sleep
    num_parts = math.ceil(seconds / _ON_WAIT_INTERVAL_S)
    for part in range(num_parts):
        if part:
            on_wait()
        time.sleep(seconds / num_parts)


def ask_in_threads(
    seconds: float, questions: Mapping[str, Callable[[], T]], *, unasked: T | None = None
) -> dict[str, T]:
    """Return the answers that come in time, in the order of the questions; `unasked` for those that no thread could be started for.

    Each is asked in a thread of its own, which a file system, a controller or a name server that hangs may keep.
    """
    import threading  # late: no command needs it (cli/__init__.py)

    found: dict[str, T] = {}

    def ask(name: str) -> None:
        found[name] = questions[name]()

    threads = {name: threading.Thread(target=ask, args=(name,), daemon=True) for name in questions}
    until = time.monotonic() + seconds
    for name, thread in threads.items():
        try:
            thread.start()
        except RuntimeError:  # too many run already (`ulimit -u`)
            if unasked is not None:
                found[name] = unasked
    for thread in threads.values():
        if thread.ident is not None:
            thread.join(max(until - time.monotonic(), 0.0))
    return {name: found[name] for name in questions if name in found}


def ask_once(path: Path, ask: Callable[[], T], unknown: T) -> T:
    """Return what `ask` returns for a path, or `unknown` if the file system does not answer; for checks repeated soon.

    The first failure is logged; the next one only after a success.
    """
    try:
        found = ask()
    except OSError as error:
        if path not in _warned_paths:
            _warned_paths.add(path)
            advice = (
                "ddp-hpc goes on without it; move it away."
                if is_final_error(error)
                else "ddp-hpc tries again; you need do nothing unless this lasts."
            )
            logging.getLogger(__name__).warning("%s cannot be read: %s. %s", path, error.strerror or error, advice)
        return unknown
    _warned_paths.discard(path)
    return found
