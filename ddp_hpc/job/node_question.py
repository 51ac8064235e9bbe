"""What a check of a job's nodes asks, and how commands run on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.node_checks.answers import Asked
from ddp_hpc.slurm.allocation import Allocation


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is checked, and how commands run on the nodes."""

    allocation: Allocation
    folder: Path
    """A directory that all nodes share; each writes a file there. It is removed."""
    environ: Mapping[str, str]
    paths: Sequence[str] = ()
    """What workers read."""
    python: Sequence[str] = (sys.executable,)
    step: Sequence[str] | None = None
    """The beginning of the command that starts a process on each node as workers start; None for a step of one CPU."""
    interfaces: Sequence[str] = ()
    """Networks to prefer (`network.interfaces`)."""
    asked: Asked = field(default_factory=Asked)
    all_reduce: bool = False
    """Whether the nodes also add up numbers by the workers' back end."""
