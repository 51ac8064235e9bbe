"""Where the ranks of an attempt meet, and why there, for readers; the workers get it from their launcher."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_hpc.base.record import read_record, write_record
from ddp_hpc.run.run_dir.paths import RunDir


@dataclass(frozen=True)
class MeetingRecord:
    """What was chosen."""

    endpoint: str
    """`ADDRESS:PORT`; an IPv6 address stands in brackets."""
    why: str
    """The network, and the rule that chose it."""


def write_meeting(run: RunDir, attempt: int, endpoint: str, why: str) -> None:
    """Record where the ranks of an attempt meet."""
    write_record(run.meeting(attempt), MeetingRecord(endpoint, why), durable=False)


def read_meeting(run: RunDir, attempt: int) -> MeetingRecord | None:
    """Return where the ranks of an attempt meet; None on one machine, or where it is not recorded."""
    return read_record(run.meeting(attempt), MeetingRecord)
