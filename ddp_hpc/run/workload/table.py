"""The workloads that this version has, and which one a spec asks for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.run.workload.protocol import Workload

WORKLOADS: dict[str, Callable[[RunSpec], bool]] = {
    "ddp_hpc.run.workload.script": lambda spec: spec.script.is_set,
    "ddp_hpc.run.workload.recipe": lambda _: True,
}
"""Module -> whether a spec asks for its workload. The first one that a spec asks for counts, so the one that every spec asks for stands
last. The module is imported then, and has `workload`, which makes a `Workload` of the spec."""


def workload_of(spec: RunSpec) -> Workload:
    """Return what the workers of this run do."""
    module = next(module for module, is_asked_for in WORKLOADS.items() if is_asked_for(spec))
    return cast("Workload", import_module(module).workload(spec))


def progress_without_spec(run: RunDir, ledger: Ledger) -> int:
    """Return the progress of a run whose spec cannot be read: what the workload says that every spec asks for."""
    return cast("int", import_module(list(WORKLOADS)[-1]).workload.progress(run, ledger))
