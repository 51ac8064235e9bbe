"""Where a run goes: this machine, or Slurm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ddp_hpc.records import Cluster
from ddp_hpc.slurm import client


def choose_cluster(asked: Literal["auto", "local", "slurm"], environ: Mapping[str, str]) -> Cluster:
    """Return where to run: `auto` is Slurm where there is one, even if it does not answer now.

    Raises:
        ConfigError: where Slurm was asked for and is not here.
    """
    if asked == "slurm":
        client.require("sbatch", environ)
    if asked == "auto":
        return "slurm" if client.is_here(environ) else "local"
    return asked
