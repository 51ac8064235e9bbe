"""The workloads that this version has, and which one a spec asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import cast

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.protocol import Workload


@dataclass(frozen=True)
class Kind:
    """A line of the table."""

    module: str
    """It has `workload(spec)`, which returns the `Workload`; imported when a run asks for it."""
    is_asked_for: Callable[[RunSpec], bool]


WORKLOADS: dict[str, Kind] = {
    "script": Kind("ddp_hpc.run.workload.script", is_asked_for=lambda spec: spec.script.is_set),
    "recipe": Kind("ddp_hpc.run.workload.recipe", is_asked_for=lambda _: True),
}
"""Name -> workload. The first one that a spec asks for counts, so the one that every spec asks for stands last."""


def workload_of(spec: RunSpec) -> Workload:
    """Return what the workers of this run do."""
    kind = next(kind for kind in WORKLOADS.values() if kind.is_asked_for(spec))
    return cast("Workload", import_module(kind.module).workload(spec))


def progress_without_spec(run: RunDir, ledger: Ledger) -> int:
    """Return the progress of a run whose spec cannot be read: what the workload says that every spec asks for."""
    last = list(WORKLOADS.values())[-1]
    return cast("int", import_module(last.module).progress(run, ledger))
