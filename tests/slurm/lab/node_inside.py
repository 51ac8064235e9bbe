"""Process 1 of a node: makes the node out of bare namespaces, starts its daemons, and reaps."""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import stat
import time
from pathlib import Path
from typing import NoReturn

from tests.slurm.lab import cgroups, daemons
from tests.slurm.lab.settings import Lab
from tests.slurm.lab.tools import PATH, sh

PRIVATE = {"/tmp": "1777", "/root": "711", "/var/spool": "755"}
"""Where each node has a directory of its own, with its mode; /run and /dev come besides."""
KEPT = Path("/run/.lab")
"""Where shared directories stay within reach while others are mounted over their places."""
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
NVIDIA_MAJOR = 195


def main(lab: Lab, node: str) -> NoReturn:
    settings = lab.booted()
    os.umask(0o022)
    os.environ["PATH"] = PATH
    ctypes.CDLL(None).sethostname(node.encode(), len(node))
    sh("mount", "--make-rprivate", "/")
    if settings.rootfs:
        _enter_rootfs(Path(settings.rootfs), lab)
    sh("mount", "-t", "proc", "proc", "/proc")
    _mount_sys()
    if settings.cgroup:
        cgroups.enter(lab.prefix, node)
    _mount_dev(settings.gpus if node != "head" else 0)
    _mount_private_places([*lab.share, lab.folder])
    _make_runtime_folders()
    _put_configuration(lab, node)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # without process 1 the kernel ends all others
    _log_to(lab.logs / f"{node}.log")
    daemons.start_all(lab, settings, node)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.2)


def _enter_rootfs(rootfs: Path, lab: Lab) -> None:
    """Go over to another Debian's programs, with this machine's users, shared directories and devices."""
    home = Path(pwd.getpwnam(lab.user).pw_dir)
    users = [Path("/etc/passwd"), Path("/etc/group"), Path("/etc/shadow")]
    for path in [Path("/sys"), Path("/dev"), *lab.share, lab.folder, home, *users]:
        if path.exists():
            _bind(path, rootfs / path.relative_to("/"))
    for name in ("hosts", "hostname"):
        (rootfs / "etc" / name).touch()
    os.chroot(rootfs)
    os.chdir("/")


def _mount_sys() -> None:
    """Mount a /sys that shows this node's interfaces, with the cgroups of the one before."""
    sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    KEPT.mkdir(mode=0o700)
    old = KEPT / "cgroup"
    old.mkdir()
    sh("mount", "--rbind", "/sys/fs/cgroup", old)
    sh("mount", "-t", "sysfs", "sysfs", "/sys")
    sh("mount", "--rbind", old, "/sys/fs/cgroup")


def _mount_dev(num_gpus: int) -> None:
    """Mount a /dev whose GPUs no other node and nobody outside sees."""
    dev = KEPT / "dev"
    dev.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "mode=755,nosuid", "tmpfs", dev)
    gpus = {f"nvidia{index}": (NVIDIA_MAJOR, index) for index in range(num_gpus)}
    for name, numbers in {**DEVICES, **gpus}.items():
        os.mknod(dev / name, 0o666 | stat.S_IFCHR, os.makedev(*numbers))
        (dev / name).chmod(0o666)
    links = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}
    for name, target in links.items():
        (dev / name).symlink_to(target)
    for name in ("pts", "shm"):
        (dev / name).mkdir()
    sh("mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666,mode=620,gid=5", "devpts", dev / "pts")
    sh("mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", dev / "shm")
    sh("mount", "--move", dev, "/dev")


def _mount_private_places(share: list[Path]) -> None:
    """Give the node a /tmp and the like of its own; put what is shared back into it."""
    closed, share = _open_up([path for path in share if path.exists()])
    for index, path in enumerate(share):
        _bind(path, KEPT / str(index))
    for place, mode in {**dict.fromkeys(closed, "711"), **PRIVATE}.items():
        Path(place).mkdir(parents=True, exist_ok=True)
        sh("mount", "-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", place)
    for index, path in enumerate(share):
        if not path.exists():
            _bind(KEPT / str(index), path)


def _open_up(share: list[Path]) -> tuple[list[str], list[Path]]:
    """Return which directories keep users from what is shared, and what of it to put back into their stead.

    A home may be closed to all but its owner, and so may a clone made in a fresh temporary directory: then what
    lies in the clone is put back, into a directory that is open.
    """
    closed: list[str] = []
    kept: list[Path] = []
    for path in share:
        outer = [parent for parent in reversed(path.parents) if not _lets_pass(parent)]
        if outer and not _is_private(outer[0]):
            closed.append(str(outer[0]))
        if path.is_dir() and not _lets_pass(path):
            if not _is_private(path):
                closed.append(str(path))
            kept += [child for child in path.iterdir() if child.exists()]
        else:
            kept.append(path)
    return closed, kept


def _lets_pass(path: Path) -> bool:
    return bool(path.stat().st_mode & stat.S_IXOTH)


def _is_private(path: Path) -> bool:
    """Say whether a path lies where the node gets a directory of its own anyway."""
    return any(path.is_relative_to(place) for place in PRIVATE)


def _bind(source: Path, place: Path) -> None:
    """Show a directory or a file at another place, which is made if need be."""
    if source.is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    sh("mount", "--rbind", source, place)


def _make_runtime_folders() -> None:
    for name, owner in (("munge", "munge"), ("slurm", "slurm"), ("mysqld", "mysql")):
        folder = Path("/run") / name
        folder.mkdir()
        shutil.chown(folder, owner, owner)
    lock = Path("/run/lock")
    lock.mkdir()
    lock.chmod(0o1777)
    Path("/var/spool/slurmd").mkdir()


def _put_configuration(lab: Lab, node: str) -> None:
    for name in ("hosts", "hostname"):
        sh("mount", "--bind", lab.folder / "etc.node" / node / name, f"/etc/{name}")
    _bind(lab.etc, Path("/etc/slurm"))


def _log_to(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
