"""What makes it possible to compute steps of a run again: what each attempt computed with, and digests of its state; and what a replay asks for.

Digests, in `digests.jsonl`, are of what all ranks have equal, to the bit. They are written after steps that depend on the step's number
alone, so two runs, or a run and its repetition, can be compared: at multiples of `integrity.every_steps`, where an attempt begins, and
before each save.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_hpc.base.record import append_record, read_record, read_records, write_record
from ddp_hpc.run.run_dir.paths import RunDir


@dataclass(frozen=True, kw_only=True)
class ReplayRequest:
    """Where the steps end that are computed again, and what to record of them."""

    end_step: int
    start_step: int | None = None
    """The step after which it begins; a worker whose checkpoint is of another step refuses to train. None: of any."""
    commits: bool = False
    """Whether to commit a checkpoint at the end, from which another part of the replay goes on."""
    state_steps: tuple[int, ...] = ()
    """After which steps the hash of each tensor of the training state is written down."""
    digest_steps: tuple[int, ...] = ()
    """After which steps the digest of what all ranks have equal is written down, as in the run's own record of digests."""
    every_state: bool = False
    """Whether one hash of the whole training state is written down after each step."""
    trace_from: int | None = None
    """The first step of which each tensor is written down, in the order in which it is computed; None: of no step."""
    trace_to: int | None = None
    """The last such step; None: the end."""

    def is_traced(self, step: int) -> bool:
        """Return whether each tensor of this step is written down."""
        return self.trace_from is not None and self.trace_from <= step <= (self.trace_to or self.end_step)


NUMERICALLY_NEUTRAL_KEYS = frozenset(
    {
        *("name", "runs_dir", "launcher", "slurm", "restart", "notify", "snapshot", "network"),
        *("checkpoint", "log", "integrity", "preflight", "debug"),
    }
)
"""Sections of the configuration, and keys outside of them, that change no computed number."""


@dataclass(frozen=True, kw_only=True)
class AttemptInputs:
    """What rank zero of an attempt was given."""

    attempt: int
    world_size: int
    config: str
    """The resolved configuration, as the run's directory held it then; a later submission may replace that file."""
    import_paths: tuple[str, ...] = ()
    """Where the user's code was imported from; in a job of Slurm, the snapshot."""
    work_dir: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    """File of the user's code that was imported -> hash of its content (xxh3_64)."""


def write_inputs(run: RunDir, inputs: AttemptInputs) -> None:
    """Write what an attempt computes with; the configuration may hold secrets, so only the owner may read it."""
    write_record(run.inputs(inputs.attempt), inputs, is_secret=True)


def read_inputs(run: RunDir, attempt: int) -> AttemptInputs | None:
    """Return what an attempt computed with; None if that was not recorded, as by older versions."""
    return read_record(run.inputs(attempt), AttemptInputs)


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
