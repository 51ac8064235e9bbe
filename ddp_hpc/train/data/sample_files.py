"""The one file that a sample is read from, and its content: proof that two attempts met the same bytes."""

from __future__ import annotations

import functools
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SETTLED_S = 3600.0
"""A file that was written more recently may still be written: by a download, a copy, or a user who repairs it."""
_MAX_FILE_BYTES = 256 * 1024 * 1024
"""Bytes of a file that holds one sample; a larger one may take long to read."""
_OTHER_SOURCE_EVENTS = ("socket.", "http.", "urllib.", "sqlite3.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn")  # fmt: skip
"""Audit events of data that come from elsewhere: https://docs.python.org/3/library/audit_events.html"""
_NON_READER_THREADS = ("checkpoint-writer", "ddp-hpc-", "QueueFeederThread")
"""How the names of threads begin that write or send meanwhile what was read before: our own, and multiprocessing's, which
sends batches to the training."""


_active_recordings: list[set[str | None]] = []
_add_audit_hook = functools.cache(sys.addaudithook)


@contextmanager
def record_sources() -> Iterator[set[str | None]]:
    """Record which files this process opens, in any thread that may read for it; None stands for a source of another kind.

    Only for a process that has met a sample that cannot be read, as a hook cannot be removed.
    """
    _add_audit_hook(_audit_hook)
    sources = set[str | None]()
    _active_recordings.append(sources)
    try:
        yield sources
    finally:
        _active_recordings.remove(sources)


def _audit_hook(event: str, args: tuple[Any, ...]) -> None:
    """Note an audit event; it must not raise."""
    if not _active_recordings:
        return
    thread = threading.current_thread()
    # multiprocessing's thread that hands the memory of sent batches over, through a socket. By itself, not by its name
    # "Thread-N (_serve)": a data set's own thread may be called so, and what that one opens counts.
    sharer = getattr(sys.modules.get("multiprocessing.resource_sharer"), "_resource_sharer", None)
    if thread.name.startswith(_NON_READER_THREADS) or thread is getattr(sharer, "_thread", None):
        return
    for sources in _active_recordings:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            sources.add(os.fsdecode(args[0]))
        elif event == "open" or event.startswith(_OTHER_SOURCE_EVENTS):
            sources.add(None)


def size_and_hash_of(sources: set[str | None]) -> str:
    """Return size and hash of the one file that was opened; empty where there is not one that can be read and is settled."""
    import hashlib  # late: only a process that has met a bad sample computes a hash

    path = next(iter(sources), None)
    if len(sources) != 1 or path is None:
        return ""
    try:
        with open(path, "rb") as file:  # noqa: PTH123  the path as it was opened
            found = os.fstat(file.fileno())
            age_s = time.time() - found.st_mtime
            if not stat.S_ISREG(found.st_mode) or not 0 < found.st_size <= _MAX_FILE_BYTES or age_s <= _SETTLED_S:
                return ""
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError):
        return ""
    is_whole = len(content) == found.st_size
    return f"{len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}" if is_whole else ""
