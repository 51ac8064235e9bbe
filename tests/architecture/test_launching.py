"""Launching knows no workload, and only one module of it knows which world was asked for; this reads the source of `job/`.

`JobContext.spec` is a `LaunchSpec`, so mypy refuses most of this already. What it cannot see is a spec that comes from
`load_resolved`, whose type has all keys.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.run.spec import LaunchSpec, RunSpec
from ddp_hpc.run.workload.table import WORKLOADS, workload_of

PACKAGE = Path(ddp_hpc.__file__).parent
LAUNCHING = sorted(
    name
    for path in (PACKAGE / "job").rglob("*.py")
    if not (name := path.relative_to(PACKAGE).as_posix()).startswith("job/script/")
)
"""What runs beside a user's script belongs to that workload."""
OF_WORKLOAD = {field.name for field in dataclasses.fields(RunSpec)} - {
    field.name for field in dataclasses.fields(LaunchSpec)
}
"""Keys that workers alone read."""
OF_WORLD = {"nodes", "workers_per_node", "local_world_size", "world_size", "world"}
"""Keys and properties of `resources` that say how many workers were asked for."""
MAKES_THE_WORLD = "job/job_context.py"
HOMES = {*WORKLOADS} | {workload_of(RunSpec(name="any")).worker}
"""Modules of workloads, which launching must not name."""
WITH_ALL_KEYS = {"ddp_hpc.run.spec", "ddp_hpc.run.spec.run", "ddp_hpc.run.spec.training"}


def breaches(source: str) -> list[str]:
    """Return what in this source text knows a workload, or which world was asked for."""
    return [found for node in ast.walk(ast.parse(source)) for found in _breaches_of(node)]


def _breaches_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute(value=owner, attr=name) if name in OF_WORKLOAD and _is_called(owner, "spec"):
            yield f"line {node.lineno} reads a workload's key: {name}"
        case ast.Attribute(value=owner, attr=name) if name in OF_WORLD and _is_called(owner, "resources"):
            yield f"line {node.lineno} asks for the world: {name}"
        case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]):
            if (name in OF_WORKLOAD and _is_called(owner, "spec")) or (
                name in OF_WORLD and _is_called(owner, "resources")
            ):
                yield f"line {node.lineno} reads {name} by its name"
        case ast.ImportFrom(module=str(module), names=names):
            imported = {module} | {f"{module}.{name.name}" for name in names}
            if imported & (WITH_ALL_KEYS | HOMES):
                yield f"line {node.lineno} imports what knows all keys, or one workload"
        case ast.Import(names=names) if {name.name for name in names} & (WITH_ALL_KEYS | HOMES):
            yield f"line {node.lineno} imports what knows all keys, or one workload"
        case ast.Constant(value=str(text)) if text in HOMES:
            yield f"line {node.lineno} names a workload's module"


def _is_called(node: ast.AST, name: str) -> bool:
    """Tell whether an expression is a name, or an attribute, called so: `spec`, `context.spec`, `self._spec`."""
    match node:
        case ast.Name(id=found) | ast.Attribute(attr=found):
            return found.lstrip("_") == name
    return False


@pytest.mark.parametrize("module", LAUNCHING)
def test_launching_reads_no_key_of_a_workload_and_no_world_that_was_only_asked_for(module: str) -> None:
    found = breaches((PACKAGE / module).read_text(encoding="utf-8"))

    assert [text for text in found if not (module == MAKES_THE_WORLD and "asks for the world" in text)] == []


def test_one_module_compares_the_world_that_was_asked_for_with_the_one_that_was_given() -> None:
    assert breaches((PACKAGE / MAKES_THE_WORLD).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "context.spec.train.epochs",
        "spec.checkpoint",
        "f(self._spec.recipe.target)",
        "getattr(spec, 'data')",
        "context.spec.resources.nodes",
        "resources.local_world_size * 2",
        "start.spec.resources.world_size",
        "spec.resources.world",
        "getattr(spec.resources, 'nodes')",
        "from ddp_hpc.run.spec import LaunchSpec",  # it has RunSpec, too
        "from ddp_hpc.run.spec.training import TrainSpec",
        "def late():\n    import ddp_hpc.run.spec.run",
        "from ddp_hpc.run.workload import recipe",
        "from ddp_hpc.train import worker",
        "WORKER = 'ddp_hpc.train.worker'",
    ],
)
def test_the_guard_sees_each_kind_of_knowledge(source: str) -> None:
    """A guard that cannot fail guards nothing."""
    assert breaches(source)


@pytest.mark.parametrize(
    "source",
    [
        "context.spec.slurm.signal_lead_s",
        "context.spec.resources.cpus_per_worker",
        "context.world.num_nodes",
        "context.workload.progress(run, ledger)",
        "from ddp_hpc.run.spec.launch import LaunchSpec",
        "from ddp_hpc.run.workload.table import workload_of",
        "sys.stderr.log",
    ],
)
def test_the_guard_lets_other_things_pass(source: str) -> None:
    assert breaches(source) == []
