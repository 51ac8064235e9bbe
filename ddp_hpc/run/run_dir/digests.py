"""The record of the training state's digests, `digests.jsonl`: what all ranks had, equal to the bit, after a step.

They are written at steps that depend on the step's number alone, so two runs, or a run and its repetition, can be compared: at
multiples of `integrity.every_steps`, where an attempt begins, and before each save.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ddp_hpc.base.record import append_record, read_records
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
    """Add a line to the record; for rank zero."""
    line = StateDigest(attempt=attempt, step=step, world_size=world_size, digest=digest, at=time.time())
    append_record(run.digests, line, durable=False)


def read_digests(run: RunDir) -> dict[int, StateDigest]:
    """Return what counts of the record, by step: where an attempt begins, it replaces what earlier ones wrote from there on."""
    counted: list[StateDigest] = []
    for line in read_records(run.digests, StateDigest):
        while counted and counted[-1].step >= line.step:
            counted.pop()
        counted.append(line)
    return {line.step: line for line in counted}
