"""Directories for what libraries leave on a node: removed at the end, and those of killed processes by a later one."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddp_hpc.base import processes

_PREFIX = "ddp_hpc-recorder-"
_LOCK = "lock"
_YOUNG_S = 60.0
"""A younger directory may be about to be locked."""


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Make a directory in `parent`, which this process holds locked; first remove those that no process holds."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or just removed
            if time.time() - path.stat().st_mtime > _YOUNG_S and not processes.is_locked(path / _LOCK):
                shutil.rmtree(path, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = processes.take_lock(path / _LOCK)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            processes.release_lock(lock)
