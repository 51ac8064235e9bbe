"""How the process of a rank ended that nobody had asked to end: for `why`, where that process could write no error report.

No decision rests on it: Slurm and a launcher end processes by the same signals when they stop a whole run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ddp_hpc.base.record import known_record, write_record
from ddp_hpc.run.run_dir.paths import RunDir


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """How a process ended."""

    code: int
    """Its exit code; minus the number of the signal that killed it."""
    at: float


def write_rank_end(run: RunDir, attempt: int, rank: int, code: int) -> None:
    """Record an end that is not recorded yet; without the record, `why` says less."""
    path = run.rank_end(attempt, rank)
    with suppress(OSError):
        if not path.exists():
            write_record(path, RankEnd(code=code, at=time.time()), durable=False)


def read_rank_ends(run: RunDir, attempt: int, ranks: Sequence[int]) -> Mapping[int, RankEnd]:
    """Return the ends that are recorded of these ranks."""
    found = {rank: known_record(run.rank_end(attempt, rank), RankEnd) for rank in ranks}
    return {rank: end for rank, end in found.items() if end is not None}
