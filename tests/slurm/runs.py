"""Runs of ours on the cluster, as its user starts and reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_hpc.run.run_dir.paths import RunDir
from tests.slurm.cluster import USER, Cluster
from tests.slurm.lab.settings import ROOT

SMALL = ("train.max_steps=12", "train.epochs=1", "checkpoint.every_steps=5", "log.every_steps=2")
"""Settings of a run that is over soon."""
TRIAL_RECIPE = ROOT / "tests" / "distributed" / "trial_recipe.py"
"""Imports torch, but not torchvision, which takes as long again as half of that."""
TRIAL = ("recipe.target=trial_recipe:build", "recipe.args={}", "recipe.args.num_samples=1200")
"""Settings of a run of it with as many steps in an epoch as a small one has."""


@dataclass(frozen=True)
class LoginNode:
    """The cluster's head, in a directory of a user's own."""

    cluster: Cluster
    folder: Path

    def __post_init__(self) -> None:
        shutil.copy(ROOT / "examples" / "digits.yaml", self.folder)
        shutil.chown(self.folder / "digits.yaml", USER, USER)

    def add_recipe(self, source: Path) -> Path:
        """Copy a recipe's module to where the user submits from; return the copy."""
        copied = self.folder / source.name
        shutil.copy(source, copied)
        shutil.chown(copied, USER, USER)
        return copied

    def type(
        self, *words: str, env: dict[str, str] | None = None, node: str = "head", timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Type `ddp-hpc ...`; return how it ended, whatever that is."""
        argv = [sys.executable, "-m", "ddp_hpc", *words]
        return self.cluster.run(*argv, node=node, cwd=self.folder, env=env, check=False, timeout=timeout)

    def submit(self, name: str, *settings: str, timeout: float = 300) -> str:
        """Submit a run to Slurm, and return what was said; it must be taken."""
        words = ["submit", "digits.yaml", f"name={name}", "--cluster", "slurm", *settings]
        done = self.type(*words, timeout=timeout)
        assert done.returncode == 0, done.stdout + done.stderr + self.console(name)
        return done.stdout

    def queue(self, name: str, *settings: str) -> str:
        """Submit a run whose job begins in an hour: a script's, since the check of a recipe would import torch."""
        words = ["submit", f"name={name}", "--cluster", "slurm", "slurm.extra.begin=now+1hour", *settings]
        done = self.type(*words, "--", "sleep", "1")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, name: str) -> RunDir:
        return RunDir(self.folder / "runs" / name)

    def console(self, name: str) -> str:
        path = self.run(name).console
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def digest(self, name: str) -> str:
        done = self.type("checkpoints", name, "--digest")
        assert done.returncode == 0, done.stderr + self.console(name)
        return done.stdout.strip()

    def status(self, name: str) -> dict[str, Any]:
        done = self.type("status", name, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def await_state(self, name: str, *states: str, timeout_s: float = 180) -> dict[str, Any]:
        """Return the status once it is one of those."""

        def found() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status["state"] in states else None

        return self.cluster.wait_for(found, timeout_s) or {}


def world(nodes: int, workers_per_node: int) -> tuple[str, str]:
    """Return the settings of a world."""
    return f"resources.nodes={nodes}", f"resources.workers_per_node={workers_per_node}"
