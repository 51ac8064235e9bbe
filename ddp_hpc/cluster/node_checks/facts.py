"""What a node says of itself: software, names, limits, disks, and what it sees of the shared directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

SOFTWARE = ("python", "torch", "cuda", "hip", "nccl", "driver", "ddp_hpc", "machine")
"""Names of what is compared between nodes, in the order of the findings."""
UNLIMITED = -1


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The free space of a directory's file system."""

    path: str
    error: str = ""
    """Why nothing can be written there; empty where a test file was written and removed."""
    free_bytes: int | None = None
    free_files: int | None = None
    """Inodes; None where the file system does not count them."""
    write_s: float = 0.0
    """How long the test file took, until it was on the disk (fsync)."""


@dataclass(frozen=True, kw_only=True)
class SharedDir:
    """What a node sees of the directory in which each node writes a file."""

    error: str = ""
    """Why this node cannot write there."""
    write_s: float = 0.0
    """How long writing its own file took, until it was on the disk (fsync)."""
    seen: tuple[str, ...] = ()
    """The nodes whose files it has read."""
    seen_s: float = 0.0
    """After how many seconds the last of them appeared."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """The answer of one node. Of a part that it could not give in time, the field has no value, and `late` names it."""

    software: Mapping[str, str] | None = None
    gpus: tuple[str, ...] | None = None
    """Models, by NVIDIA's driver; empty where there is none."""
    num_gpus: int | None = None
    """GPUs that a process of the job may use; None where nothing shows whether there are any."""
    num_cpus: int | None = None
    """CPUs that a process of the job may use."""
    names: Mapping[str, tuple[str, ...]] | None = None
    """Name of each node -> the addresses that this node resolves it to; none where it does not resolve."""
    reverse_s: float | None = None
    """How long the slowest lookup of a name by an address took."""
    networks: Mapping[str, int] | None = None
    """Kind of network (`InfiniBand`) -> how many interfaces of this node could carry ranks; 0 where all of them are down."""
    limits: Mapping[str, int] | None = None
    """Limits of this process (ulimit): the soft ones; `UNLIMITED` for none."""
    has_rdma: bool = False
    """Whether this node has InfiniBand or RoCE devices."""
    disks: Mapping[str, Disk] | None = None
    """What it is for -> a disk of this node."""
    shared: SharedDir | None = None
    paths: Mapping[str, str] | None = None
    """Path that the run reads -> what is there: `THERE`, `MISSING`, `EMPTY`, or an error."""
    mounts: Mapping[str, tuple[str, str, str]] | None = None
    """Path that the run reads -> where its file system begins, its type, and its source."""
    granted_gpus: int | None = None
    """GPUs of this node that Slurm has given to the job; None where it does not say."""
    late: tuple[str, ...] = ()
    """Names of the parts that took too long."""


THERE, MISSING, EMPTY = "there", "missing", "empty"
"""What is at a path. Any other text is the error with which it cannot be read."""


def neighbours(at: int, nodes: Sequence[str]) -> list[str]:
    """Return the nodes whose names and files the node at this place checks: the next four on each side of a ring of all, so that no work grows with their number."""
    around = [nodes[(at + step) % len(nodes)] for step in range(-_EACH_SIDE, _EACH_SIDE + 1)]
    return [node for node in dict.fromkeys(around) if node != nodes[at]]


_EACH_SIDE = 4


def parse_facts(plain: Any) -> NodeFacts | None:
    """Return a node's answer from JSON; None for anything else, such as the answer of another version of ddp-hpc."""
    try:
        return msgspec.convert(plain, NodeFacts)
    except msgspec.ValidationError:
        return None
