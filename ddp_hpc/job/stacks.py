"""What watchdogs left in the ranks' logs, put together: who stands where, and who keeps the others waiting."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ddp_hpc.run_dir import RunDir

_BARK = re.compile(r"^Timeout \(\d+:\d\d:\d\d", re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) .*?:\n((?:  .*\n?)*)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_TAIL_BYTES = 256 << 10
_WAITING_FOR_OTHERS = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/")
"""Where a rank stands that waits for another: in a collective, or in the backward that exchanges gradients."""
_NOT_MAIN = ("threading.py", "concurrent/futures/thread.py")


@dataclass(frozen=True)
class Stand:
    """Where one rank stood."""

    rank: int
    frames: Sequence[str]
    """Of its main thread, the innermost first: `file:line in function`."""
    stacks: str
    """Of all its threads, as they were written."""

    @property
    def waits_for_others(self) -> bool:
        return any(part in frame for frame in self.frames[:4] for part in _WAITING_FOR_OTHERS)

    @property
    def place(self) -> str:
        return self.frames[0] if self.frames else "a place without Python"


def read_stands(run: RunDir, attempt: int, world_size: int) -> list[Stand]:
    """Return where the ranks stood whose watchdogs have bitten in an attempt."""
    return [stand for rank in range(world_size) if (stand := _read(run, attempt, rank)) is not None]


def has_stacks(run: RunDir, attempt: int, world_size: int) -> bool:
    """Tell whether any watchdog has bitten."""
    return any(_read(run, attempt, rank) is not None for rank in range(world_size))


def laggard(stands: Sequence[Stand], world_size: int, *, bereft: Collection[int] = ()) -> tuple[int, str] | None:
    """Return the rank that keeps the others waiting, and where it stands; None where all wait for each other.

    It is the one that does not wait for others, or the one that said nothing at all: frozen, or cut off. Those that are
    `bereft` lost the connection to one that was bitten before them, so they had waited.
    """
    silent = sorted(set(range(world_size)) - {stand.rank for stand in stands} - set(bereft))
    busy = [stand for stand in stands if not stand.waits_for_others]
    if len(silent) == 1:
        return silent[0], "says nothing: it is frozen, or cut off"
    if busy and len(busy) < world_size:
        return busy[0].rank, f"stands in {busy[0].place}"
    if world_size == 1 and stands:
        return 0, f"stands in {stands[0].place}"
    return None


def _read(run: RunDir, attempt: int, rank: int) -> Stand | None:
    try:
        with run.rank_log(attempt, rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    barks = list(_BARK.finditer(text))
    if not barks:
        return None
    stacks = text[barks[-1].start() :]
    return Stand(rank, _main_frames(stacks), stacks)


def _main_frames(stacks: str) -> list[str]:
    """Return the frames of the main thread, which has none of `threading` at its bottom."""
    for thread in _THREAD.finditer(stacks):
        frames = [f"{match['file']}:{match['line']} in {match['function']}" for match in _FRAME.finditer(thread[1])]
        if frames and not any(part in frames[-1] for part in _NOT_MAIN):
            return frames
    return []
