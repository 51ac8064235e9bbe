"""The stacks that watchdogs dumped into the ranks' logs: where each rank was."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ddp_hpc.cluster.rank_probe.compare import main_frames
from ddp_hpc.cluster.rank_probe.hang_verdict import RankStack
from ddp_hpc.run.run_dir.hang_records import HangRecord
from ddp_hpc.run.run_dir.paths import RunDir

_DUMP = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_TAIL_BYTES = 256 << 10


def read_rank_stacks(run: RunDir, attempt: int, world_size: int, records: Sequence[HangRecord] = ()) -> list[RankStack]:
    """Return the stacks of the ranks whose watchdogs timed out, and of those that only their node has asked: a script's."""
    asked = {one.rank: RankStack(one.rank, main_frames(one.stacks), one.stacks) for one in records if one.stacks}
    found = [_read(run, attempt, rank) or asked.get(rank) for rank in range(world_size)]
    return [stand for stand in found if stand is not None]


def has_stacks(run: RunDir, attempt: int, world_size: int) -> bool:
    """Tell whether any watchdog timed out."""
    return any(_read(run, attempt, rank) is not None for rank in range(world_size))


def _read(run: RunDir, attempt: int, rank: int) -> RankStack | None:
    try:
        with run.rank_log(attempt, rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    dumps = list(_DUMP.finditer(text))
    if not dumps:
        return None
    stacks = text[dumps[-1].start() :]
    return RankStack(rank, main_frames(stacks), stacks)
