"""Reads how many more threads the limits of this node let this process start: those of the user, the cgroup and the kernel.

A library that cannot start a thread may end the process (`std::terminate`). So the limits are read before, and nothing is tried:
what a trial takes, another process of the node lacks in that moment.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ASSUMED = 1024
"""The lowest limit that is usual for a pod (`podPidsLimit` of kubelet). A container does not see the cgroups above its own."""
_ARENA = 64 << 20
"""Address space that glibc reserves for a thread's heap, beside its stack (mallopt(3))."""
_CGROUP_PATTERN = re.compile(r"^(?:\d+:(?:\w+,)*(?P<v1>pids)(?:,\w+)*|0:):(?P<path>/.*)$", re.MULTILINE)

ThreadRoom = tuple[int, str]
"""How many threads one limit leaves, and the same as a sentence; none where it is not known, and why."""


def thread_room(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), *, num_limit: int | None = None
) -> ThreadRoom | None:
    """Return what the strictest limit leaves; None without any. `num_limit` is the user's (RLIMIT_NPROC), by default this process's.

    Where a limit cannot be read, no room is known, and so none is left.
    """
    try:
        return min([*_kernel_rooms(proc, num_limit), *_memory_rooms(proc), *_cgroup_rooms(proc, cgroups)], default=None)
    except (OSError, ValueError, IndexError) as error:
        return _unknown_room(f"a limit cannot be read: {error}")


def _room_left(num_threads: int, limit: str) -> ThreadRoom:
    return num_threads, f"{limit} leaves room for {max(0, num_threads)} threads on this node"


def _unknown_room(why: str) -> ThreadRoom:
    return 0, f"it is not known how many threads may be started on this node ({why})"


def _kernel_rooms(proc: Path, num_limit: int | None) -> Iterator[ThreadRoom]:
    # All threads of the node. The user has no more; counting them alone would miss those in other containers.
    num_all = int((proc / "loadavg").read_text(encoding="utf-8").split()[3].partition("/")[2])
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0] if num_limit is None else num_limit
    if limit != resource.RLIM_INFINITY:
        yield _room_left(limit - num_all, f"`ulimit -u` ({limit})")
    for name in ("threads-max", "pid_max"):
        limit = int((proc / "sys/kernel" / name).read_text(encoding="utf-8"))
        yield _room_left(limit - num_all, f"kernel.{name} ({limit})")


def _memory_rooms(proc: Path) -> Iterator[ThreadRoom]:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        used = int((proc / "self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
        size = _ARENA + (stack if stack != resource.RLIM_INFINITY else 8 << 20)
        yield _room_left((limit - used) // size, f"`ulimit -v` ({limit // 1024})")


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[ThreadRoom]:
    """https://docs.kernel.org/admin-guide/cgroup-v2.html (PID), and version 1: the limits of all cgroups above count, too."""
    found = list(_CGROUP_PATTERN.finditer((proc / "self/cgroup").read_text(encoding="utf-8")))
    of_v1 = next((one for one in found if one["v1"]), None)
    chosen = of_v1 or next(iter(found), None)
    if chosen is None:  # this kernel has no cgroups
        return
    top = next((cgroups / name for name in ("pids" if of_v1 else "unified",) if (cgroups / name).is_dir()), cgroups)
    own = top / chosen["path"].lstrip("/")
    # A process in a cgroup namespace may stand beside what its container shows: `/../..`.
    for folder in [top] if ".." in own.parts else [own, *own.parents]:
        if folder.is_relative_to(top):
            with suppress(FileNotFoundError):  # the root has no limit; a container may lack folders of its host
                limit = (folder / "pids.max").read_text(encoding="utf-8").strip()
                if limit != "max":
                    used = int((folder / "pids.current").read_text(encoding="utf-8"))
                    yield _room_left(int(limit) - used, f"the cgroup's pids.max ({limit})")
    # Files that only the root of all cgroups has, or lacks: where this is not the root, limits above it are not seen.
    is_root = (top / "release_agent").exists() if of_v1 else not (top / "cgroup.type").exists()
    if not is_root or not (top / "cgroup.procs").exists():
        try:
            used = int((top / "pids.current").read_text(encoding="utf-8"))
        except OSError:
            yield _unknown_room("the cgroup's pids.max is not readable")
        else:
            yield _room_left(_ASSUMED - used, f"a cgroup above this container, which may have pids.max {_ASSUMED},")
