"""The numbers a run wrote on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from ddp_hpc.durable import read_json_lines
from ddp_hpc.run_dir import RunDir

_ABOUT = frozenset({"kind", "step", "epoch", "at"})


def read_metrics(run: RunDir, kind: Literal["train", "eval"], *, after: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the lines of one kind that were written later than `after`, oldest first."""
    for line in read_json_lines(run.metrics):
        if line.get("kind") == kind and line.get("at", 0.0) > after:
            yield line


def numbers_of(line: dict[str, Any]) -> dict[str, float]:
    """Return a line's numbers, without what says when they were measured."""
    return {name: value for name, value in line.items() if name not in _ABOUT and isinstance(value, (int, float))}
