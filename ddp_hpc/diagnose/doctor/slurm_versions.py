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


HOLES: Sequence[Hole] = (
    Hole(
        what="CVE-2025-43904: a coordinator of an account can add a user with elevated privileges",
        fixed=((23, 11, 11), (24, 5, 8), (24, 11, 5), (25, 5, 0)),
        source="https://github.com/SchedMD/slurm, CHANGELOG of these releases",
    ),
    Hole(
        what="CVE-2026-65107 and others up to CVE-2026-65168: among them, sbcast does not check the credential for shared objects",
        fixed=((25, 5, 9), (25, 11, 8), (26, 5, 4)),
        source="https://github.com/SchedMD/slurm/releases",
    ),
)
"""Of many more, those that a user of a cluster may ask about. A distribution may have added a fix to an older release (Debian: DSA-5961-1)."""


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
