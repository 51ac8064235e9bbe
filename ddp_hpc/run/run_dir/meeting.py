"""Where the ranks of an attempt meet, and why there, for readers; the workers get it from their launcher."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ddp_hpc.base.durable import make_directories, read_json, replace_text
from ddp_hpc.run.run_dir.paths import RunDir


@dataclass(frozen=True)
class MeetingRecord:
    """What was chosen."""

    endpoint: str
    """`ADDRESS:PORT`; an IPv6 address stands in brackets."""
    why: str
    """The network, and the rule that chose it."""


def write_meeting(run: RunDir, attempt: int, endpoint: str, why: str) -> None:
    """Record where the ranks of an attempt meet.

    Raises:
        OSError: if the file cannot be written.
    """
    path = run.meeting(attempt)
    make_directories(path.parent)
    replace_text(path, json.dumps({"endpoint": endpoint, "why": why}), durable=False)


def read_meeting(run: RunDir, attempt: int) -> MeetingRecord | None:
    """Return where the ranks of an attempt meet; None on one machine, or where it is not recorded."""
    record = read_json(run.meeting(attempt)) or {}
    endpoint, why = record.get("endpoint"), record.get("why")
    return MeetingRecord(endpoint, why) if isinstance(endpoint, str) and isinstance(why, str) else None
