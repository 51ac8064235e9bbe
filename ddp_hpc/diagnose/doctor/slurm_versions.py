"""Known security holes of Slurm by version, each with its source. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hole:
    """A hole, and the first release of each branch without it."""

    what: str
    fixed: tuple[tuple[int, int, int], ...]
    """The releases that mend it, one a branch. A branch older than all of these got none."""
    source: str

    @property
    def fixed_in(self) -> str:
        return ", ".join(f"{major:02d}.{minor:02d}.{patch}" for major, minor, patch in self.fixed)


HOLES: Sequence[Hole] = ()


def known_holes(version: str) -> list[Hole]:
    """Return the holes that a version has; none where the version cannot be read."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        return []
    branch, patch = (int(match[1]), int(match[2])), int(match[3] or 0)
    return [hole for hole in HOLES if _has(branch, patch, hole)]


def _has(branch: tuple[int, int], patch: int, hole: Hole) -> bool:
    mended = {(major, minor): number for major, minor, number in hole.fixed}
    return patch < mended[branch] if branch in mended else branch < max(mended)
