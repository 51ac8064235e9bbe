"""The numbers a run wrote on the way."""

from __future__ import annotations

from typing import Any

_ABOUT = frozenset({"kind", "step", "epoch", "at"})


def numbers_of(line: dict[str, Any]) -> dict[str, float]:
    """Return a line's numbers, without what says when they were measured."""
    return {name: value for name, value in line.items() if name not in _ABOUT and isinstance(value, (int, float))}
