"""The import contracts in pyproject.toml hold, and each breaks where it should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ddp_hpc

ROOT = Path(ddp_hpc.__file__).parents[1]
LINT_IMPORTS = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the package and its contracts, to plant trespasses in."""
    shutil.copytree(ROOT / "ddp_hpc", tmp_path / "ddp_hpc", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def broken_contracts(root: Path) -> set[str]:
    """Return the names of the contracts that import-linter finds broken below `root`."""
    argv = [sys.executable, "-c", LINT_IMPORTS, "--no-logo", "--no-cache"]
    environ = {**os.environ, "PYTHONPATH": str(root), "NO_COLOR": "1"}
    done = subprocess.run(argv, cwd=root, env=environ, capture_output=True, text=True, check=False)
    broken = set(re.findall(r"^(.+) BROKEN\b", done.stdout, flags=re.MULTILINE))
    assert (done.returncode == 0) == (not broken), done.stdout + done.stderr
    return broken


def test_the_contracts_hold(copy: Path) -> None:
    assert broken_contracts(copy) == set()


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("base/mounts.py", "import ddp_hpc.run.world", "Wings"),
        ("run/run_dir/paths.py", "import ddp_hpc.run.spec", "Inside of a wing"),
        ("watch/status.py", "import ddp_hpc.job.supervisor", "Wings"),
        ("run/spec/run.py", "def late():\n    import ddp_hpc.cli", "Wings"),
        ("attic.py", "", "Wings"),  # a new room must be given its floor
        ("job/supervisor.py", "import torch", "Only the train wing"),
        ("run/checkpoints/checkpoint_store.py", "from numpy import array", "Only the train wing"),
        ("train/engine/loop.py", "import submitit", "Submitit"),
        ("watch/status.py", "import jinja2", "Jinja2"),
        ("job/supervisor.py", "from ddp_hpc.run.spec.training import TrainSpec", "Launching knows no workload"),
        ("job/launcher.py", "from ddp_hpc.run.spec.run import RunSpec", "Launching knows no workload"),
        (
            "job/ending/takeover.py",
            "def late():\n    import ddp_hpc.run.checkpoints.checkpoint_store",
            "Launching knows no workload",
        ),
    ],
)
def test_a_trespass_breaks_its_contract(copy: Path, module: str, line: str, contract: str) -> None:
    with (copy / "ddp_hpc" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")

    (broken,) = broken_contracts(copy)

    assert broken.startswith(contract)
