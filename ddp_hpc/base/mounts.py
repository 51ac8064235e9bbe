"""Which file system a path lies on, by the kernel's list of this process's mounts (proc_pid_mounts(5))."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

AUTOMOUNT = "autofs"
"""The type of a place where a mount appears once a process looks into it (autofs(5))."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file system, and where it begins."""

    point: str
    fs_type: str
    source: str = ""
    """A device, or `server:/export`."""


def mount_of(path: Path) -> Mount | None:
    """Return the mount that a path lies on, whether or not the path exists; None where the kernel's list cannot be read."""
    import psutil  # late: few commands need it

    real, found = os.path.realpath(path), None
    with suppress(OSError):
        for one in psutil.disk_partitions(all=True):
            is_above = real == one.mountpoint or real.startswith(one.mountpoint.rstrip("/") + "/")
            # A later mount covers an earlier one.
            if is_above and (found is None or len(one.mountpoint) >= len(found.point)):
                found = Mount(point=one.mountpoint, fs_type=one.fstype, source=one.device)
    return found
