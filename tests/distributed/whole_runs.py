"""Runs of the trial recipe through the command line, as a user starts them, and their processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Workplace:
    """A directory with a configuration of the trial recipe, and the runs made from it."""

    path: Path
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """What commands get. Threads must not hand on this process's own: pytest changes it from test to test, and an exec that
    reads it at that moment fails with "Bad address" (subprocess forks so that the child shares its parent's memory)."""

    @property
    def config(self) -> Path:
        return self.path / "trial.yaml"

    def run(self, name: str) -> RunDir:
        return RunDir(self.path / "runs" / name)

    def command(self, verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `ddp-hpc VERB WORDS` here; return what it printed and its exit code."""
        argv = [sys.executable, "-m", "ddp_hpc", verb, *words]
        return subprocess.run(
            argv, cwd=self.path, env=self.environ, capture_output=True, text=True, check=False, timeout=340
        )

    def submit(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.command("submit", str(self.config), f"name={name}", *words)

    def finish(self, name: str, *words: str) -> str:
        """Submit and wait for the end; return the digest of the whole training state."""
        done = self.submit(name, "--wait", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.digest(name)

    def digest(self, name: str) -> str:
        printed = self.command("checkpoints", name, "--digest")
        assert printed.returncode == 0, printed.stderr
        return printed.stdout.strip()

    def samples(self, name: str) -> dict[int, tuple[int, list[int]]]:
        """Return the epoch and the sample ids of every step; a step taken by several attempts counts by the newest."""
        steps: dict[int, tuple[int, int, list[int]]] = {}
        for path in sorted(self.run(name).samples.glob("attempt-*/rank-*.jsonl")):
            attempt = int(path.parent.name.removeprefix("attempt-"))
            for line in path.read_text().splitlines():
                record: dict[str, Any] = json.loads(line)
                known = steps.get(record["step"])
                if known is None or known[0] < attempt:
                    steps[record["step"]] = (attempt, record["epoch"], [])
                if known is None or known[0] <= attempt:
                    steps[record["step"]][2].extend(record["samples"])
        return {step: (epoch, ids) for step, (_, epoch, ids) in steps.items()}


def make_workplace(path: Path, text: str) -> Workplace:
    """Write a configuration whose recipe is `trial_recipe`, found beside it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "trial_recipe.py").symlink_to(HERE / "trial_recipe.py")
    workplace = Workplace(path)
    workplace.config.write_text(text)
    return workplace


def cases_of(test: Callable[..., None], parameter: str, request: pytest.FixtureRequest) -> list[Any]:
    """Return the values of a test's parameter in the order in which this session runs them.

    What tests wait for may begin before them, as many at a time as there are cores: most of a small run is one process
    that imports torch while the other cores have nothing to do.
    """
    tests = (item for item in request.session.items if isinstance(item, pytest.Function))
    return [item.callspec.params[parameter] for item in tests if item.obj is test]


def live_processes(run: RunDir) -> dict[str, list[psutil.Process]]:
    """Return the run's processes by what they are: supervisor, agent, worker (by rank), loader."""
    found: dict[str, list[psutil.Process]] = {"supervisor": [], "agent": [], "worker": [], "loader": []}
    try:
        supervisor = psutil.Process(Ledger.read(run).attempts[-1].pid)
        found["supervisor"] = [supervisor]
        found["agent"] = supervisor.children()
        found["worker"] = [worker for agent in found["agent"] for worker in agent.children()]
        found["loader"] = [loader for worker in found["worker"] for loader in worker.children()]
    except (psutil.NoSuchProcess, IndexError):
        pass
    return found
