"""What each rank was doing when it made no progress: its stacks, its collectives and its process's state, as files of the run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_hpc.base.durable import numbers_in_names
from ddp_hpc.base.patience import ask_once
from ddp_hpc.base.record import try_read_record, write_record
from ddp_hpc.run.run_dir.paths import RunDir

MOST_COLLECTIVES = 400
"""Newest collectives that are kept of a rank; each has about 500 bytes."""
MOST_STACK_CHARACTERS = 256 << 10
"""Characters of stacks that are kept of a rank."""
SAME_HANG_S = 120.0
"""Records that are older than the newest one by more are of an earlier time, when a rank was slow and went on."""

DUMPING_STATE = "dumping core"
"""The state of a process that has crashed, and whose memory the kernel still writes to a file."""


@dataclass(frozen=True, kw_only=True)
class RankInHang:
    """One rank, as its node saw it."""

    rank: int
    host: str
    at: float
    pid: int | None = None
    state: str = ""
    """Of its process: `running`, `sleeping`, `stopped`, `in the kernel (...)`, `DUMPING_STATE`; empty where it is not known."""
    answers: bool = False
    """Whether the process answers at all."""
    stacks: str | None = None
    """Of all threads, in Python's words; None where it gave none."""
    line: str = ""
    """The source of the innermost line of the main thread, where it was asked for and is known."""
    flight_record: Mapping[str, Any] | None = None
    """Its newest collectives, oldest first, and its process groups, as PyTorch writes them."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """What was asked for and did not come, and why."""

    @property
    def holds_interpreter(self) -> bool:
        """Whether only the question that needs the interpreter (GIL) has no answer."""
        return self.answers and self.stacks is None


def write_hang_record(run: RunDir, attempt: int, record: RankInHang) -> None:
    """Write a record, in place of an older one of the same rank."""
    flight = record.flight_record
    if flight is not None and isinstance(flight.get("entries"), list):
        flight = {**flight, "entries": flight["entries"][-MOST_COLLECTIVES:]}
    kept = replace(record, flight_record=flight, stacks=record.stacks and record.stacks[:MOST_STACK_CHARACTERS])
    write_record(run.hang_record(attempt, record.rank), kept, durable=False)


def read_hang_records(run: RunDir, attempt: int) -> Sequence[RankInHang]:
    """Return the records of an attempt's last hang, by rank."""
    folder = run.hang_record(attempt, 0).parent
    ranks: list[int] = ask_once(folder, lambda: numbers_in_names(folder, re.compile(r"rank-(\d+)\.json")), unknown=[])
    found: list[tuple[float, RankInHang]] = []
    for path in (run.hang_record(attempt, rank) for rank in ranks):
        record = try_read_record(path, RankInHang)
        if record is not None:
            # By the file's time, which one file server gives: the clocks of nodes may differ by more.
            status = ask_once(path, path.stat, unknown=None)
            found.append((status.st_mtime if status else 0.0, record))
    newest = max((written for written, _ in found), default=0.0)
    return sorted((one for written, one in found if newest - written <= SAME_HANG_S), key=lambda one: one.rank)
