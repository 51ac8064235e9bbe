"""Runs that end badly in known ways, and what `ddp-hpc why` has to say of each: for a test, and for the published table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
Workload = Literal["recipe", "loaders", "script", "new process"]
"""A recipe; one with loader processes; a script that is forked; one that is a new process."""
CONFIG = """
recipe: {target: "dying_recipe:build", args: {how: none}}
train: {epochs: 9, max_steps: 12, global_batch_size: 8, lr: 0.01}
"""
SETTINGS = ("resources.workers_per_node=2", "restart.max_no_progress=1", "restart.hang_timeout_s=20")
PATIENCE_S = 240.0


@dataclass(frozen=True)
class Death:
    """One way to end, and the right answer."""

    workload: Workload
    how: str
    failure: str
    rank: int | None = 1
    entity: str = ""

    @property
    def name(self) -> str:
        return f"{self.workload.replace(' ', '_')}-{self.how}"


_BOTH = (
    ("exception", "user-exception"),
    ("decoy", "user-exception"),
    ("segfault", "native-crash"),
    ("abort", "native-crash"),
    ("kill", "killed"),
    ("exit", "exit-code"),
    ("import", "import"),
    ("disk", "disk-full"),
    ("memory", "host-memory"),
    ("port", "port"),
    ("dns", "dns"),
)
"""How rank 1 ends -> the class."""

DEATHS: Sequence[Death] = (
    *(Death("recipe", how, failure) for how, failure in _BOTH),
    Death("recipe", "data", "data", rank=None, entity="train_data[9]"),
    Death("loaders", "data", "data", rank=None, entity="train_data[9]"),
    Death("recipe", "nan", "nan", rank=None),
    Death("recipe", "hang", "hang-behind"),
    Death("recipe", "quit", "exit-code"),
    *(Death("script", how, failure) for how, failure in _BOTH),
    Death("script", "data", "data"),
    Death("script", "nan", "nan"),
    Death("script", "caught", "exit-code"),
    Death("script", "hang", "hang-behind"),
    Death("script", "term", "signal"),
    *(Death("new process", how, failure) for how, failure in _BOTH),
    Death("new process", "data", "data"),
    Death("new process", "caught", "exit-code"),
)
"""`rank` is None where no rank is the only one."""


def happen(death: Death, folder: Path) -> None:
    """Run it to its end in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "dying_recipe.py", folder)
    shutil.copy(HERE / "scripts" / "dying.py", folder)
    (folder / "dying.yaml").write_text(CONFIG)
    settings = [*SETTINGS, "name=dying"]
    if death.workload in {"recipe", "loaders"}:
        loaders = ["data.num_workers=1"] if death.workload == "loaders" else []
        words = ["dying.yaml", *settings, f"recipe.args.how={death.how}", *loaders, "--wait"]
    else:
        start = "exec" if death.workload == "new process" else "fork"
        words = ["--wait", *settings, f"script.start={start}", "--", sys.executable, "dying.py", death.how]
    ended = _ddp_hpc(folder, "submit", *words)
    assert ended.returncode != 0, ended.stdout


def ask(folder: Path) -> dict[str, Any]:
    """Return what `ddp-hpc why --json` says of what happened in this folder."""
    said = _ddp_hpc(folder, "why", "dying", "--json")
    assert said.returncode == 0, said.stderr
    answer: dict[str, Any] = json.loads(said.stdout)
    return answer


def _ddp_hpc(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    argv = [sys.executable, "-m", "ddp_hpc", *words]
    return subprocess.run(
        argv, cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
