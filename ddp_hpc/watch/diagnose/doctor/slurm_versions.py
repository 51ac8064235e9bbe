"""Known security holes of Slurm by version, each with its source. Pure.

The eight of September 2026 are those that SchedMD names in the notes of releases 25.05.9 and 25.11.8
(https://github.com/SchedMD/slurm/releases/tag/slurm-25-11-8-1); AWS ParallelCluster's notice says that all versions before these two and
26.05.4 have them (https://github.com/aws/aws-parallelcluster/issues/7601). The numbers between are not Slurm's.
"""

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
        source="https://github.com/SchedMD/slurm/blob/master/CHANGELOG/slurm-24.11.md",
    ),
    Hole(
        what="CVE-2026-65107 (sbcast does not check the credential for shared objects), -65108, -65109, -65138, -65139, -65140, -65165 "
        "and -65168",
        fixed=((25, 5, 9), (25, 11, 8), (26, 5, 4)),
        source="https://github.com/SchedMD/slurm/releases/tag/slurm-25-11-8-1",
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
