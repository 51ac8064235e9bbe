"""What rank zero notes of the time of a run: when training begins, saves and evaluations, and the time in each phase of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from ddp_hpc.run_dir.paths import RunDir

Kind = Literal["begin", "phases", "save", "evaluation"]


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of `timeline.jsonl`."""

    kind: Kind
    attempt: int
    at: float
    """When it was written: at the end of a save or an evaluation."""
    step: int
    world_size: int | None = None
    """Of the attempt; in the line of its beginning, as the next."""
    num_gpus: int | None = None
    """How many GPUs the workers use, on all nodes."""
    seconds: float | None = None
    """How long the save took to be committed, or the evaluation took."""
    num_steps: int | None = None
    """How many steps of this attempt the phases are of."""
    phases: Mapping[str, float] | None = None
    """Seconds in each phase of rank zero since the attempt's training began."""


class Look(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of `waits.jsonl`: one comparison of all ranks."""

    attempt: int
    at: float
    step: int | None = None
    step_s: float
    """The middle one of the times between two steps."""
    lost_s: Mapping[int, float]
    """Rank -> how much later than the middle one of the others it was in the middle one of its steps; below zero, it was earlier."""
    nodes: Mapping[int, str] = msgspec.field(default_factory=dict)
    """Rank -> its node's name; only in the first line of an attempt."""
    phases: Mapping[str, Sequence[float]] = msgspec.field(default_factory=dict)
    """Phase -> seconds a step of the quickest rank, the middle one and the slowest one."""


T = TypeVar("T", Mark, Look)


def encode(record: Mark | Look) -> bytes:
    """Return a record as a line."""
    return msgspec.json.encode(record) + b"\n"


def read_marks(run: RunDir) -> list[Mark]:
    """Return what rank zero has noted, oldest first; empty for a script, and for a run of an older version.

    Raises:
        OSError: if the file system does not answer.
    """
    return [*_records(_lines(run, "timeline"), msgspec.json.Decoder(Mark))]


def read_looks(run: RunDir) -> list[Look]:
    """Return the comparisons of all ranks, oldest first; empty where none was made.

    Raises:
        OSError: if the file system does not answer.
    """
    return [*_records(_lines(run, "waits"), msgspec.json.Decoder(Look))]


def _lines(run: RunDir, which: Literal["timeline", "waits"]) -> Sequence[bytes]:
    try:
        return (run.timeline if which == "timeline" else run.waits).read_bytes().split(b"\n")
    except FileNotFoundError:
        return []


def _records(lines: Sequence[bytes], decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
    for line in lines:
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError:  # empty, half written, or not ours
            continue
