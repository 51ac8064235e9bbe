"""Really trains with a slow rank, and returns what the run's records say of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_hpc.run.run_dir.paths import RunDir
from tests.slurm.cluster import USER, Cluster

MODEL = Path(__file__).with_name("slow_model.py")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: where which rank loses how much of each step."""

    where: str = "none"
    slow: int = -1
    delay: float = 0.0
    is_script: bool = False
    base: float = 0.3
    """What a step takes on all ranks, in seconds."""
    work: int = 0
    """Matrix products a step, on all ranks."""
    steps: int = 60
    ranks: int = 3
    launcher: Literal["agent", "srun", "torchrun"] | None = None
    """What starts the workers on the test cluster, a node each; None: the agent, on this machine."""

    @property
    def name(self) -> str:
        what = f"{'script' if self.is_script else 'recipe'}-{self.where}-{self.slow}-{self.delay:g}"
        return what if self.launcher is None else f"{what}-{self.launcher}"

    def argv(self, run: Path) -> Sequence[str]:
        submit = [
            "submit",
            *([] if self.is_script else ["recipe.yaml"]),
            *self._world,
            "--wait",
            f"runs_dir={run.parent}",
            f"name={run.name}",
            "restart.max_no_progress=1",
        ]
        if self.is_script:
            words = [self.where, self.slow, self.delay, self.base, self.work, self.steps]
            return [*submit, "--", "python", "slow_model.py", *map(str, words)]
        args = {"where": self.where, "slow": self.slow, "delay": self.delay, "base": self.base, "work": self.work}
        return [
            *submit,
            *(f"recipe.args.{key}={value}" for key, value in args.items()),
            f"train.max_steps={self.steps}",
            f"train.global_batch_size={self.ranks}",
            "optimizer.name=sgd",
            "checkpoint.every_steps=null",
        ]

    @property
    def _world(self) -> Sequence[str]:
        if self.launcher is None:
            return ["--cluster=local", f"resources.workers_per_node={self.ranks}"]
        world = [f"resources.nodes={self.ranks}", "resources.workers_per_node=1", "resources.cpus_per_worker=1"]
        return ["--cluster=slurm", f"launcher={self.launcher}", *world]


def train(case: Case, folder: Path, cluster: Cluster | None = None) -> tuple[RunDir, str]:
    """Train in this folder, on the cluster if one is given; return the run, and what was printed."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(MODEL, folder / "slow_model.py")
    (folder / "recipe.yaml").write_text("recipe:\n  target: slow_model:build\n")
    run = RunDir(folder / "runs" / case.name)
    argv = [sys.executable, "-m", "ddp_hpc", *case.argv(run.path)]
    if cluster is None:
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=900)
    else:
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, USER, USER)
        done = cluster.run(*argv, cwd=folder, check=False, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{case.name}: {done.stdout}{done.stderr}")
    return run, run.console.read_text()
