"""Whoever starts or ends runs knows the protocol of a back end, and none by its name; this reads the source and says who does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.launch.submission.backend import BACKENDS

PACKAGE = Path(ddp_hpc.__file__).parent
HOMES = {module for module, _ in BACKENDS.values()}
TABLE = "ddp_hpc.launch.submission.backend"
SLURMS_OWN = {
    "prove/drill/scenario.py",  # a fault is made by a step of a Slurm job
    "cli/verbs/render.py",  # makes a script for plain sbatch
}
"""Who asks for Slurm's back end by its name."""
CALLERS = sorted(
    {
        path.relative_to(PACKAGE).as_posix()
        for room in ("cli", "launch/submission", "prove/certify", "prove/drill")
        for path in [PACKAGE / "launch" / "api.py", *(PACKAGE / room).rglob("*.py")]
    }
)


def breaches(source: str) -> list[str]:
    """Return what in this source text knows a back end by its name."""
    return [told for node in ast.walk(ast.parse(source)) for told in _breaches_of(node)]


def _breaches_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(left=left, comparators=others):
            for side in (left, *others):
                if any(_is_name(one) for one in ast.walk(side)):
                    yield f"line {node.lineno} compares with a back end's name"
        case ast.match_case(pattern=ast.MatchValue(value=value)) if _is_name(value):
            yield f"line {value.lineno} matches a back end's name"
        case ast.ImportFrom(module=str(module), names=names):
            if module in HOMES or {f"{module}.{name.name}" for name in names} & HOMES:
                yield f"line {node.lineno} imports a back end"
        case ast.Import(names=names) if {name.name for name in names} & HOMES:
            yield f"line {node.lineno} imports a back end"
        case ast.Call(func=ast.Name(id="load_backend"), args=[argument, *_]) if _is_name(argument):
            yield f"line {node.lineno} asks for a back end by its name"


def _is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value in BACKENDS


def test_callers_know_no_back_end_by_its_name() -> None:
    found = [(room, told) for room in CALLERS for told in breaches((PACKAGE / room).read_text(encoding="utf-8"))]

    assert [(room, told) for room, told in found if not (room in SLURMS_OWN and "asks for" in told)] == []


@pytest.mark.parametrize("room", sorted(SLURMS_OWN))
def test_each_exception_is_needed(room: str) -> None:
    assert breaches((PACKAGE / room).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "source",
    [
        "if cluster == 'slurm': pass",
        "x = 1 if 'local' != where else 2",
        "y = run.backend in {'slurm', 'pbs'}",
        "match cluster:\n    case 'slurm':\n        pass",
        "from ddp_hpc.launch.submission import local",
        "from ddp_hpc.launch.submission.slurm import wait",
        "def f():\n    import ddp_hpc.launch.submission.slurm",
        "load_backend('slurm').cancel(run, {})",
    ],
)
def test_the_guard_sees_each_kind_of_knowledge(source: str) -> None:
    """A guard that cannot fail guards nothing."""
    assert breaches(source)


@pytest.mark.parametrize(
    "source",
    [
        "backend_of(run).cancel(run, environ)",
        "from ddp_hpc.launch.submission.backend import load_backend",
        "from ddp_hpc.cluster.slurm import client",
        "load_backend(submission.backend)",
        "if state == 'waiting': pass",
        "spec.slurm.partition == 'gpu'",
    ],
)
def test_the_guard_lets_other_things_pass(source: str) -> None:
    assert breaches(source) == []


def test_only_a_running_job_submits_without_submitit() -> None:
    """From a login node every new job is allocated in one place (ADR 24)."""
    callers = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if "client.submit(" in path.read_text(encoding="utf-8")
    ]

    assert callers
    assert {caller.partition("/")[0] for caller in callers} == {"job", "launch"}
    assert [caller for caller in callers if caller.startswith("launch")] == ["launch/submission/allocate.py"], (
        "its arrays"
    )


def test_nothing_but_the_verb_for_it_starts_a_waiting_job_sooner() -> None:
    """Who waits for a run, or looks at it, changes nothing in its job."""
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}

    assert {path for path, text in texts.items() if "backend.hasten(" in text} == {"cli/verbs/requeue.py"}
    assert {path for path, text in texts.items() if "client.release(" in text} == {
        "launch/submission/release_hold.py",
    }
    assert not any(re.search(r"client\.(update|requeue|cancel)\(", texts[path]) for path in texts if "watch/" in path)
