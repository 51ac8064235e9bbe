"""A function fits on a screen: at most 60 lines. Ruff counts statements, of which a call over forty lines is one."""

from __future__ import annotations

import ast
from pathlib import Path

import ddp_hpc

PACKAGE = Path(ddp_hpc.__file__).parent
MOST_LINES = 60


def test_a_function_has_sixty_lines_at_most() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= MOST_LINES
    }

    assert found == set()
