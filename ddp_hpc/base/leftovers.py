"""Name a directory that is being made, so that what a killed process leaves of it can be removed later."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from ddp_hpc.base.processes import start_ticks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_NAME_PATTERN = re.compile(r"\..+\.(?P<place>[0-9a-f]{12}-\d+)-(?P<pid>\d+)-(?P<started>\d+)\.tmp")


def scratch_dir_path(path: Path) -> Path:
    """Return the path of a hidden directory beside `path`, for this process alone; it is to be renamed to `path` when it is complete."""
    place, pid = _pid_scope(), os.getpid()
    started = None if place is None else start_ticks(pid)
    who = str(pid) if started is None else f"{place}-{pid}-{started}"
    return path.with_name(f".{path.name}.{who}.tmp")


def remove_leftovers(folder: Path) -> None:
    """Remove the directories of `scratch_dir_path` in a folder whose process has ended. What another host's process makes is left alone."""
    place = _pid_scope()
    try:
        names = os.listdir(folder)  # noqa: PTH208  names are compared, not paths
    except OSError:
        return  # who uses the folder says what is wrong with it
    for found in filter(None, map(_NAME_PATTERN.fullmatch, names)):
        if found["place"] == place and _has_ended(int(found["pid"]), int(found["started"])):
            shutil.rmtree(folder / found[0], ignore_errors=True)


def _pid_scope() -> str | None:
    """Return what is equal for two processes only if they see the same process behind a pid; None where that is not known."""
    # Two hosts may have one name, and containers of one host may have pids of their own. A host has another boot id after each start.
    with suppress(OSError):
        return f"{_BOOT_ID.read_text().strip()[-12:]}-{_PID_NAMESPACE.stat().st_ino}"
    return None


def _has_ended(pid: int, started: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # another user's
    now = start_ticks(pid)
    return now is not None and now != started
