"""Which file system a path lies on, by the kernel's list of this process's mounts (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
AUTOMOUNT = "autofs"
"""The type of a place where a mount appears once a process looks into it (autofs(5))."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file system, and where it begins."""

    point: str
    fs_type: str
    source: str = ""
    """A device, or `server:/export`."""


def mount_of(path: Path, *, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """Return the mount that a path lies on, whether or not the path exists; None where the kernel's list cannot be read."""
    real = os.path.realpath(path)
    try:
        text = mountinfo.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    # The last mount of the longest of the points above the path: a later one covers an earlier one.
    found: Mount | None = None
    for line in text.splitlines():
        front, separator, back = line.partition(" - ")
        before, after = front.split(), back.split()
        if not separator or len(before) < 5 or len(after) < 2:
            continue
        mount = Mount(point=_unescape_octal(before[4]), fs_type=after[0], source=_unescape_octal(after[1]))
        is_above = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if is_above and (found is None or len(mount.point) >= len(found.point)):
            found = mount
    return found


def _unescape_octal(text: str) -> str:
    """Return a name in which the kernel wrote a space, or the like, as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
