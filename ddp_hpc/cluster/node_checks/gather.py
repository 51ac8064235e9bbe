"""One node's side of the check before training: says what this node has and sees. It imports no torch.

    srun --ntasks-per-node=1 python -m ddp_hpc.cluster.node_checks.gather --folder DIR --node NAME ... --mark MARK

Each part is gathered in a thread of its own, as a mount or a name server that does not answer may hold one for ever: what
is not there after `PATIENCE_S` is left out, and named.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ddp_hpc import __version__
from ddp_hpc.base.mounts import Mount, mount_of
from ddp_hpc.base.patience import ask_in_threads, is_final_error
from ddp_hpc.base.processes import kernel_text
from ddp_hpc.cluster.node_checks.facts import EMPTY, MISSING, THERE, UNLIMITED, Disk, NodeFacts, SharedDir, neighbours
from ddp_hpc.cluster.rendezvous.address import addresses_of
from ddp_hpc.cluster.rendezvous.choose_network import fabric, why_unusable
from ddp_hpc.cluster.rendezvous.interfaces import Interface, local_interfaces
from ddp_hpc.cluster.slurm.allocation import node_name, num_granted_gpus
from ddp_hpc.cluster.slurm.framing import framed
from ddp_hpc.run.run_dir.software_versions import environment_here

PATIENCE_S = 12.0
"""How long a node may take for all parts."""
FILES_WAIT_S = 8.0
"""How long it waits for the other nodes' files: they may have started later, and NFS shows a new file after some seconds."""
LOOK_AGAIN_S = 3.0
"""For how long it looks again at a path that is missing or empty: a mount, or the entry of another node, takes a moment to be seen."""
_LOOK_AGAIN_PAUSE_S = 0.5
NAMES_S = 8.0
"""How long all lookups of names may take, side by side: a name server that does not answer holds each up for 5 s and more."""
_TEST_BYTES = 1 << 20
_LOOK_S, _LONGEST_LOOK_S = 0.02, 1.0
_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
"""https://docs.kernel.org/gpu/amdgpu/driver-core.html: where amdgpu's compute part lists what it drives."""
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "memlock": resource.RLIMIT_MEMLOCK, "nproc": resource.RLIMIT_NPROC}


def gather(
    own: str, nodes: Sequence[str], *, folder: Path, paths: Sequence[str], environ: Mapping[str, str]
) -> NodeFacts:
    """Return what this node, called `own`, says of itself."""
    near = neighbours(nodes.index(own), nodes)
    asked = {nodes[0], *near}

    def disks() -> dict[str, Any]:
        own_tmp = Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108
        tmp = own_tmp if own_tmp.is_dir() else Path("/tmp")  # noqa: S108  as programs choose, where an image lacks the job's own
        return {"disks": {"temporary files": probe_disk(tmp), "shared memory": probe_disk(Path("/dev/shm"))}}  # noqa: S108

    def software() -> dict[str, Any]:
        here = environment_here(environ)
        names = ("python", "torch", "cuda", "hip", "nccl", "driver", "machine")
        versions = {**{name: getattr(here, name) for name in names}, "ddp_hpc": __version__}
        num = num_gpus(environ, here.gpus)
        return {"software": versions, "gpus": here.gpus, "num_gpus": num, "granted_gpus": num_granted_gpus(environ)}

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "software": software,
        "names": lambda: {"names": ask_in_threads(NAMES_S, {name: partial(resolve_name, name) for name in asked})},
        "reverse DNS": lambda: {"reverse_s": _reverse_s(nodes)},
        "networks": lambda: {"networks": num_by_network(local_interfaces())},
        "disks": disks,
        "shared": lambda: {"shared": probe_shared(folder, own, near)},
        **{f"path {path}": lambda path=path: {f"path {path}": _state_and_mount(Path(path))} for path in paths},  # type: ignore[misc]  # mypy infers no type of a default in a lambda
    }
    answers = ask_in_threads(PATIENCE_S, parts)
    found = {key: value for part in answers.values() for key, value in part.items()}
    late = [name for name in parts if name not in answers]
    told = {path: found.pop(f"path {path}") for path in paths if f"path {path}" in found}
    names = found.get("names", {})
    if "names" in found and len(names) < len(asked):
        late = [*late, f"{len(asked) - len(names)} of {len(asked)} names"]
    mounts = {path: (mount.point, mount.fs_type, mount.source) for path, (_, mount) in told.items() if mount}
    states = {path: state for path, (state, _) in told.items()}
    # Of no thread: they are known also where none can be started.
    has_rdma = any(Path("/sys/class/infiniband").glob("*"))
    found |= {"limits": limits(), "num_cpus": len(os.sched_getaffinity(0)), "has_rdma": has_rdma}
    return NodeFacts(**found, paths=states, mounts=mounts, late=tuple(late))


def _state_and_mount(path: Path) -> tuple[str, Mount | None]:
    """Return what is at a path, and on which file system.

    Nothing, or an empty directory, may be a file system that is not mounted yet: the first look has an automounter mount it,
    and the second one finds it. Its mount is read last, as it may come by the first look.
    """
    state, until = path_state(path), time.monotonic() + LOOK_AGAIN_S
    while state in {MISSING, EMPTY} and time.monotonic() < until:
        time.sleep(_LOOK_AGAIN_PAUSE_S)
        state = path_state(path)
    return state, mount_of(path)


def num_gpus(
    environ: Mapping[str, str], models: Sequence[str], *, dev: Path = Path("/dev"), kfd: Path = _KFD
) -> int | None:
    """Return how many GPUs a process may use; None where nothing shows whether there are any.

    `models` are those that NVIDIA's driver lists: of a GPU that it has lost, the job's variables still tell.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        if name in environ:
            visible = [one for one in environ[name].split(",") if one and one != "-1"]
            are_whole = bool(models) and not any(one.startswith("MIG-") for one in visible)
            return min(len(visible), len(models)) if are_whole else len(visible)
    # To AMD's driver, a CPU is one of the nodes, too, with the number 0.
    num_of_amd = sum(kernel_text(path).strip() not in {"", "0"} for path in kfd.glob("*/gpu_id"))
    return len(list(dev.glob("nvidia[0-9]*"))) or num_of_amd or None


def num_by_network(interfaces: Sequence[Interface]) -> dict[str, int]:
    """Return how many interfaces of each kind of network ranks could meet on; 0 for a kind of which all are down."""
    found: dict[str, int] = {}
    for interface in interfaces:
        if interface.kind not in _NON_NETWORK_KINDS:
            found[fabric(interface)] = found.get(fabric(interface), 0) + (why_unusable(interface) is None)
    return found


_NON_NETWORK_KINDS = frozenset({"loopback", "virtual bridge", "overlay", "tunnel"})


def resolve_name(name: str) -> tuple[str, ...]:
    """Return the addresses that this node finds for a name, in order; none where it does not resolve."""
    return tuple(sorted(addresses_of(name)))


def _reverse_s(nodes: Sequence[str]) -> float:
    """Return how long the slowest of a few lookups of a name by an address takes, `NAMES_S` at most: PyTorch's store makes one for each peer."""
    named = ask_in_threads(NAMES_S / 2, {node: partial(resolve_name, node) for node in nodes[:2]})
    addresses = [address for found in named.values() for address in found[:1]]

    def look_up(address: str) -> float:
        began = time.monotonic()
        with suppress(OSError):
            socket.getnameinfo((address, 0), 0)
        return time.monotonic() - began

    slowest = ask_in_threads(NAMES_S, {address: partial(look_up, address) for address in addresses})
    return max((slowest.get(address, NAMES_S) for address in addresses), default=0.0)


def limits() -> dict[str, int]:
    """Return the limits of this process: the soft ones, but the hard one of open files, as agents raise the soft one."""
    found = {name: resource.getrlimit(which)[name == "nofile"] for name, which in _LIMITS.items()}
    return {name: UNLIMITED if limit == resource.RLIM_INFINITY else limit for name, limit in found.items()}


def probe_disk(path: Path) -> Disk:
    """Return the free space of a directory, and whether a file of 1 MiB can be written there: a quota shows only then."""
    test = path / f".ddp-hpc-doctor-{os.getpid()}-{socket.gethostname()}"
    error, began = "", time.monotonic()
    try:
        _write(test, b"\0" * _TEST_BYTES)
    except OSError as found:
        error = found.strerror or str(found)
    write_s = round(time.monotonic() - began, 2)
    with suppress(OSError):
        test.unlink()
    try:
        room = os.statvfs(path)
    except OSError as found:
        return Disk(path=str(path), error=error or found.strerror or str(found))
    files = room.f_favail if room.f_files else None
    free = room.f_bavail * room.f_frsize
    return Disk(path=str(path), error=error, free_bytes=free, free_files=files, write_s=write_s)


def _write(path: Path, content: bytes) -> None:
    """Write a file until it is on the disk; a network file system reports a full disk or quota only then."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def probe_shared(folder: Path, own: str, others: Sequence[str]) -> SharedDir:
    """Write a file into a directory that all nodes share; wait until those of the others can be read here."""
    began = time.monotonic()
    large = folder / f".{own}"
    try:
        (folder / own).write_text(f"{own}\n", encoding="utf-8")
        written = time.monotonic()
        _write(large, b"\0" * _TEST_BYTES)
        large.unlink()
    except OSError as error:
        return SharedDir(error=error.strerror or str(error))
    wrote = time.monotonic()
    unseen, seen = [own, *others], []
    pause = _LOOK_S
    while unseen:
        for node in [*unseen]:
            with suppress(OSError):
                if (folder / node).read_text(encoding="utf-8", errors="replace") == f"{node}\n":
                    seen.append(node)
        unseen = [node for node in unseen if node not in seen]
        if not unseen or time.monotonic() + pause > began + FILES_WAIT_S:
            break
        time.sleep(pause)
        # Each look for a file that is not there is a question to the file server.
        pause = min(pause * 2, _LONGEST_LOOK_S)
    return SharedDir(write_s=wrote - written, seen=tuple(seen), seen_s=time.monotonic() - wrote)


def path_state(path: Path) -> str:
    """Return what is at a path: `THERE`, `MISSING`, `EMPTY` for a directory without entries, or why it cannot be read."""
    try:
        if path.is_dir():
            with os.scandir(path) as entries:
                return THERE if next(entries, None) is not None else EMPTY
        # Opening a FIFO waits for a writer, and opening a device may do anything.
        if path.is_file():
            with path.open("rb") as file:
                file.read(1)
        else:
            path.stat()
    except OSError as error:
        return MISSING if is_final_error(error) else error.strerror or str(error)
    return THERE


def main(argv: Sequence[str] | None = None) -> int:
    """Print this node's answer."""
    parser = argparse.ArgumentParser(prog="ddp_hpc.cluster.node_checks.gather", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="a directory that all nodes share")
    parser.add_argument("--node", action="append", required=True, help="the name of a node; once for each")
    parser.add_argument("--path", action="append", default=[], help="a path that workers read")
    parser.add_argument("--mark", required=True, help="stands in each line of the answer")
    arguments = parser.parse_args(argv)
    own = node_name(os.environ)
    facts = gather(own, arguments.node, folder=arguments.folder, paths=arguments.path, environ=os.environ)
    sys.stdout.write(framed(asdict(facts), node=own, mark=arguments.mark))
    sys.stdout.flush()
    os._exit(0)  # a thread that waits for a file system would hold a plain exit


if __name__ == "__main__":
    sys.exit(main())
