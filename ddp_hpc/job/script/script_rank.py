"""One rank of one attempt of a run that runs a user's script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ddp_hpc.job.script.plan import ScriptPlan
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec


@dataclass(frozen=True, kw_only=True)
class ScriptRank:
    """Which rank it is, and what it runs."""

    run: RunDir
    spec: RunSpec
    plan: ScriptPlan
    rank: int
    attempt: int

    @property
    def log(self) -> Path:
        return self.run.rank_log(self.attempt, self.rank)
