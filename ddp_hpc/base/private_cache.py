"""A directory on this node's disk for what compilers keep, which no other user can make first."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def private_cache_dir() -> Path | None:
    """Return the directory, the same for all runs of this user on this node; None where no disk can be written.

    It has a name that others can foresee. Where something of that name is there which this user did not make, or which others may
    enter, this process gets a directory of its own.
    """
    with suppress(OSError):
        path = Path(tempfile.gettempdir()).resolve() / f"ddp_hpc-cache-{os.getuid()}"
        with suppress(FileExistsError):
            path.mkdir(mode=stat.S_IRWXU)
        found = path.lstat()
        if found.st_mode == stat.S_IFDIR | stat.S_IRWXU and found.st_uid == os.getuid():
            return path
        return Path(tempfile.mkdtemp(prefix=f"{path.name}-"))
    return None
