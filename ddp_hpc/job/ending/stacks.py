"""The stacks that watchdogs dumped into the ranks' logs: where each rank was, and which one the others waited for."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_hpc.cluster.rank_probe.compare import main_frames
from ddp_hpc.run.run_dir.hang_records import HangRecord
from ddp_hpc.run.run_dir.paths import RunDir

_DUMP = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_TAIL_BYTES = 256 << 10
_WAITING_FOR_OTHERS = (
    *("torch/distributed/", "torch/autograd/", "torch/nn/parallel/"),
    "ddp_hpc/train/sealed_store.py",
)
"""Code in which a rank waits for others: a collective, the backward pass that exchanges gradients, or the store."""


@dataclass(frozen=True)
class RankStack:
    """The stacks of one rank."""

    rank: int
    frames: Sequence[str]
    """Of its main thread, the innermost first: `file:line in function`."""
    stacks: str
    """Of all its threads, as `faulthandler` wrote them."""

    @property
    def waits_for_others(self) -> bool:
        return any(part in frame for frame in self.frames[:4] for part in _WAITING_FOR_OTHERS)

    @property
    def place(self) -> str:
        return self.frames[0] if self.frames else "code without a Python frame"


def read_rank_stacks(run: RunDir, attempt: int, world_size: int) -> list[RankStack]:
    """Return the stacks of the ranks whose watchdogs timed out in an attempt."""
    return [stand for rank in range(world_size) if (stand := _read(run, attempt, rank)) is not None]


def with_records(stands: Sequence[RankStack], records: Sequence[HangRecord]) -> list[RankStack]:
    """Add the stacks of the ranks that only their node has asked for: a script's, which has no watchdog of ours."""
    there = {stand.rank for stand in stands}
    asked = [
        RankStack(one.rank, main_frames(one.stacks), one.stacks)
        for one in records
        if one.stacks is not None and one.rank not in there
    ]
    return sorted((*stands, *asked), key=lambda stand: stand.rank)


def has_stacks(run: RunDir, attempt: int, world_size: int) -> bool:
    """Tell whether any watchdog timed out."""
    return any(_read(run, attempt, rank) is not None for rank in range(world_size))


def straggler(
    stands: Sequence[RankStack], world_size: int, *, lost_peer: Collection[int] = ()
) -> tuple[int, str] | None:
    """Return the rank that the others wait for, and what it does; None where all wait for each other.

    It is the one that does not wait for others, or the one without a stack: a process that is stopped (SIGSTOP) or cut off
    prints none. The ranks in `lost_peer` did wait: they ended before their own timeout, as a rank that timed out earlier
    closed its connections.
    """
    silent = sorted(set(range(world_size)) - {stand.rank for stand in stands} - set(lost_peer))
    busy = [stand for stand in stands if not stand.waits_for_others]
    if len(silent) == 1:
        return silent[0], "did not print its stack: the process is stopped, or its node has no network"
    if busy and len(busy) < world_size:
        return busy[0].rank, f"is in {busy[0].place}"
    if world_size == 1 and stands:
        return 0, f"is in {stands[0].place}"
    return None


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
