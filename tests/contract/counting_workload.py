"""A workload that is no training: its workers count in a file. All that launching has to know of it stands here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.protocol import UsersCode, Workload


def is_asked_for(spec: RunSpec) -> bool:
    """What stands in the table of workloads."""
    return spec.recipe.target == "counting:count"


def workload(spec: RunSpec) -> Workload:
    """Return the counting that this spec describes."""
    return CountingWorkload(spec)


class CountingWorkload(Workload):
    """Count to `recipe.args.to`."""

    worker = "tests.contract.counting_worker"
    stop_signal = "TERM"
    teardown_s = 60.0
    cpus_per_worker = 1
    without_progress = "ended without a new number"

    @property
    def goal(self) -> Mapping[str, Any]:
        return {"count": self.spec.recipe.args["to"]}

    def progress(self, run: RunDir, ledger: Ledger, *, is_patient: bool = True) -> int:
        del ledger, is_patient
        return counted(run)

    def progress_on_disk(self, run: RunDir) -> int | None:
        return counted(run)

    def users_code(self, import_paths: Sequence[Path]) -> UsersCode | None:
        return UsersCode(import_paths[0], Path("counting.txt")) if import_paths else None

    def input_paths(self, work_dir: Path) -> Iterator[Path]:
        yield work_dir / "numbers"


def counted(run: RunDir) -> int:
    """Return how far the workers have counted."""
    path = run.path / "count"
    return int(path.read_text()) if path.exists() else 0
