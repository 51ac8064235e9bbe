"""How the process of a rank ended that nobody had asked to end: for `why`, where that process could write no error report.

No decision rests on it: Slurm and a launcher end processes by the same signals when they stop a whole run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from ddp_hpc.base.durable import read_json, replace_text
from ddp_hpc.base.patience import known
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
            replace_text(path, json.dumps(asdict(RankEnd(code=code, at=time.time()))), durable=False)


def read_rank_ends(run: RunDir, attempt: int, ranks: Sequence[int]) -> Mapping[int, RankEnd]:
    """Return the ends that are recorded of these ranks."""
    found = {}
    for rank in ranks:
        path = run.rank_end(attempt, rank)
        record = known(path, partial(read_json, path), unknown=None) or {}
        if isinstance(code := record.get("code"), int) and isinstance(at := record.get("at"), int | float):
            found[rank] = RankEnd(code=code, at=float(at))
    return found
