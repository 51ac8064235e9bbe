"""A small training whose ranks write down their environment, and what `ddp-hpc env` says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_hpc.cluster.rendezvous.worker_env import TABLE_VARIABLE
from ddp_hpc.train.recipe import Recipe


def build(folder: str) -> Recipe:
    """Return the recipe; write this rank's findings into a folder."""
    environ = dict(os.environ)
    rows = env_says(environ)
    names = {row["name"] for row in rows} | {TABLE_VARIABLE}
    kept = ("MASTER_ADDR", "MASTER_PORT")  # no task of a plain srun could know what the supervisor has chosen
    plain = {
        name: value for name, value in environ.items() if name not in names or name in kept or name.startswith("SLURM_")
    }
    found = {
        "environ": environ,
        "at_exec": Path("/proc/self/environ").read_bytes().decode(errors="replace").split("\0"),
        "env": rows,
        "derived_by_a_plain_task": env_says({**plain, "PYTHONPATH": environ.get("PYTHONPATH", "")}),
    }
    (Path(folder) / f"rank-{environ['RANK']}.json").write_text(json.dumps(found))
    data = TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
    return Recipe(model=nn.Linear(4, 2), train_data=data, loss=nn.CrossEntropyLoss())


def env_says(environ: dict[str, str]) -> list[dict[str, str]]:
    """Return the rows of `ddp-hpc env --json` in this environment."""
    argv = [sys.executable, "-m", "ddp_hpc", "env", "--json"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    rows: list[dict[str, str]] = json.loads(done.stdout)["variables"]
    return rows
