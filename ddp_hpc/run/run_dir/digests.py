"""The record of the training state's digests, `digests.jsonl`: what all ranks had, equal to the bit, after a step.

They are written at steps that depend on the step's number alone, so two runs, or a run and its repetition, can be compared: at
multiples of `integrity.every_steps`, where an attempt begins, and before each save.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ddp_hpc.base.durable import append_json_line, read_json_lines
from ddp_hpc.run.run_dir.paths import RunDir


@dataclass(frozen=True, kw_only=True)
class StateDigest:
    """The digest of the tensors that all ranks have equal after `step`."""

    attempt: int
    step: int
    world_size: int
    """How many ranks computed it; with another number, sums are rounded otherwise, and digests differ."""
    digest: str
    """16 hex digits."""
    at: float
    """Seconds since the epoch."""


def record_digest(run: RunDir, *, attempt: int, step: int, world_size: int, digest: str) -> None:
    """Add a line to the record; for rank zero.

    Raises:
        OSError: if it cannot be written.
    """
    line = StateDigest(attempt=attempt, step=step, world_size=world_size, digest=digest, at=time.time())
    append_json_line(run.digests, asdict(line), durable=False)


def read_digests(run: RunDir) -> dict[int, StateDigest]:
    """Return what counts of the record, by step: where an attempt begins, it replaces what earlier ones wrote from there on.

    Raises:
        OSError: if the file cannot be read.
    """
    counted: list[StateDigest] = []
    for line in filter(None, map(_of_record, read_json_lines(run.digests))):
        while counted and counted[-1].step >= line.step:
            counted.pop()
        counted.append(line)
    return {line.step: line for line in counted}


def _of_record(record: Mapping[str, Any]) -> StateDigest | None:
    """Return a line of the file; None where it is not one, such as of a later version."""
    try:
        line = StateDigest(**{key: record[key] for key in StateDigest.__dataclass_fields__})
    except KeyError:
        return None
    are_right = all(isinstance(number, int) for number in (line.attempt, line.step, line.world_size))
    return line if are_right and isinstance(line.digest, str) else None
