"""Supervision talks to Slurm through one object."""

from __future__ import annotations

import ast
from pathlib import Path

import ddp_hpc

JOB = Path(ddp_hpc.__file__).parent / "job"


def asks_slurm(source: str) -> bool:
    """Tell whether this source text imports what runs Slurm's commands."""
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return any(name.startswith(("ddp_hpc.slurm.client", "ddp_hpc.slurm.nodes")) for name in names)


def test_only_the_slurm_job_asks_slurm_and_orders_something_of_it() -> None:
    asking = {path.relative_to(JOB).as_posix() for path in JOB.rglob("*.py") if asks_slurm(path.read_text("utf-8"))}

    assert asking == {"slurm_job.py"}


def test_the_guard_sees_each_kind_of_import() -> None:
    assert asks_slurm("from ddp_hpc.slurm import client")
    assert asks_slurm("def late():\n    from ddp_hpc.slurm.client import job")
    assert asks_slurm("from ddp_hpc.slurm.nodes import nodes_to_exclude")
    assert not asks_slurm("from ddp_hpc.slurm import states")
