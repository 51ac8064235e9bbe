"""Supervision talks to Slurm through one object, and one of its modules begins attempts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddp_hpc

JOB = Path(ddp_hpc.__file__).parent / "job"

SLURM = ("ddp_hpc.cluster.slurm.client", "ddp_hpc.cluster.slurm.exclude_nodes")
"""What runs Slurm's commands."""
BEGINS = (
    "ddp_hpc.run.run_dir.ownership",
    "ddp_hpc.run.run_dir.ledger.record_start",
)
"""What writes down whose the run is, and that an attempt began."""
ASKS = {
    "ending/attempt_end.py",  # gives the claim of a run's last attempt up
    "ending/evidence.py",  # asks only whether the attempt was fenced
    "guardian.py",  # asks only for the number of the next attempt
    "node/join.py",  # asks only how the lock is taken
    "supervisor.py",  # asks only how the lock is taken
    "script/worker.py",  # asks only whether the attempt was fenced
    "workers.py",  # asks only whether the attempt was fenced
}


def takes(source: str, doors: tuple[str, ...]) -> bool:
    """Tell whether this source text imports one of these names, or what begins with one."""
    names = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return any(name.startswith(doors) for name in names)


@pytest.mark.parametrize(("doors", "users"), [(SLURM, {"slurm_job.py"}), (BEGINS, {"attempt_start.py", *ASKS})])
def test_supervision_has_one_object_for_slurm_and_one_module_that_begins_attempts(
    doors: tuple[str, ...], users: set[str]
) -> None:
    found = {path.relative_to(JOB).as_posix() for path in JOB.rglob("*.py") if takes(path.read_text("utf-8"), doors)}

    assert found == users


@pytest.mark.parametrize(
    "source",
    [
        "from ddp_hpc.cluster.slurm import client",
        "def late():\n    from ddp_hpc.cluster.slurm.client import job",
        "from ddp_hpc.cluster.slurm.exclude_nodes import nodes_to_exclude",
        "from ddp_hpc.run.run_dir import ownership",
        "from ddp_hpc.run.run_dir.ledger import Ledger, record_start",
    ],
)
def test_the_guard_sees_each_kind_of_import(source: str) -> None:
    assert takes(source, (*SLURM, *BEGINS))
