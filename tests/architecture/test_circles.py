"""No modules import each other in a circle, imports inside of functions and for types included."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ddp_hpc

PACKAGE = Path(ddp_hpc.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, known: Collection[str]) -> set[str]:
    """Return the modules among `known` that this source text imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found |= {alias.name for alias in names}.intersection(known)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    full = f"{module}.{alias.name}"
                    found |= {full if full in known else module}.intersection(known)
    return found


def circle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """Return modules that import each other, the first one twice; none if there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = {name_of(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    del sources["ddp_hpc"]  # the package's face imports what is asked for, when it is asked for
    imports = {name: imports_of(source, sources.keys() - {name}) for name, source in sources.items()}

    assert circle(imports) == []


@pytest.mark.parametrize(
    "source",
    [
        "import a.b",
        "from a.b import name",
        "from a import b",
        "def late():\n    from a.b import name",
        "if TYPE_CHECKING:\n    from a import b",
    ],
)
def test_the_guard_sees_each_kind_of_import(source: str) -> None:
    assert set(circle({"a.b": {"c"}, "c": imports_of(source, {"a", "a.b"})})) == {"a.b", "c"}
