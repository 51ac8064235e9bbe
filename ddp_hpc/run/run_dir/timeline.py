"""What rank zero notes of the time of a run, and what each comparison of all ranks found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from ddp_hpc.base.durable import MOST_BYTES_OF_LINES, json_line, open_record, read_json_lines
from ddp_hpc.run.run_dir.paths import RunDir

Kind = Literal["begin", "phases", "save", "evaluation", "interval"]
_LARGEST = 2.0**63
MOST_LOOKS = 20_000
"""How many comparisons are read. A run of ten weeks has fewer; of more, evenly spaced ones show the same."""
_OF_FIRST = b'"nodes"'
"""Stands in the first line of each attempt, which is always read."""
_KINDS = ("begin", "phases", "save", "evaluation", "interval")


@dataclass(frozen=True, kw_only=True)
class Mark:
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
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds in each phase of rank zero since the attempt's training began."""
    interval: Mapping[str, float] = field(default_factory=dict)
    """What `checkpoint.every_steps=auto` has chosen, and by which numbers (`train.auto_interval`)."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """One line of `waits.jsonl`: one comparison of all ranks."""

    attempt: int
    at: float
    step: int | None = None
    step_s: float
    """The middle one of the times between two steps."""
    lost_s: Mapping[int, float]
    """Rank -> how much later than the middle one of the others it was in the middle one of its steps; below zero, it was earlier."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Rank -> its node's name; only in the first line of an attempt."""
    phases: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Phase -> seconds a step of the quickest rank, the middle one and the slowest one."""


def encode(record: Mark | Look) -> bytes:
    """Return a record as a line; fields that say nothing are left out."""
    return json.dumps({key: value for key, value in asdict(record).items() if value not in (None, {})}).encode() + b"\n"


def read_marks(run: RunDir) -> list[Mark]:
    """Return what rank zero has noted, oldest first; empty for a script, and for a run of an older version.

    A line that is half written, or not ours, is skipped.

    Raises:
        OSError: if the file system does not answer.
    """
    return [mark for line in read_json_lines(run.timeline) if (mark := _mark(line)) is not None]


def read_many_marks(run: RunDir) -> list[Mark]:
    """Return the same as `read_marks`, several times as fast, after an import of 10 ms: for who reads many runs.

    Raises:
        OSError: if the file system does not answer.
    """
    decode = _decoder()
    found = []
    for line in _lines(run.timeline):
        try:
            mark = decode(line)
        except (ValueError, RecursionError):
            mark = None
        if mark is None or not _is_sound(mark):  # half written, or written by hand: as `read_marks` takes it
            record = json_line(line)
            mark = None if record is None else _mark(record)
        if mark is not None:
            found.append(mark)
    return found


@cache
def _decoder() -> Callable[[bytes], Mark | None]:
    import msgspec  # late: `status` of one run does without it

    return msgspec.json.Decoder(Mark).decode


def _is_sound(mark: Mark) -> bool:
    whole = (mark.attempt, mark.step, mark.world_size or 0, mark.num_gpus or 0, mark.num_steps or 0)
    numbers = (mark.at, mark.seconds or 0.0, *whole, *mark.phases.values(), *mark.interval.values())
    return -_LARGEST <= min(numbers) <= max(numbers) <= _LARGEST


def read_looks(run: RunDir) -> list[Look]:
    """Return the comparisons of all ranks, oldest first; empty where none was made. Of very many, some are left out.

    A line that is half written, or not ours, is skipped.

    Raises:
        OSError: if something else than a file is there, or the file system does not answer.
    """
    every = 1 + sum(1 for _ in _lines(run.waits)) // MOST_LOOKS
    chosen = (line for number, line in enumerate(_lines(run.waits)) if number % every == 0 or _OF_FIRST in line)
    return [look for line in chosen if (look := _look_in(line)) is not None]


def read_nodes(run: RunDir, attempt: int) -> Mapping[int, str]:
    """Return the node of each rank of an attempt, as its first comparison of all ranks has it; empty before that.

    Raises:
        OSError: if something else than a file is there, or the file system does not answer.
    """
    firsts = (_look_in(line) for line in _lines(run.waits) if _OF_FIRST in line)
    return next((one.nodes for one in firsts if one is not None and one.attempt == attempt), {})


def _lines(path: Path) -> Iterator[bytes]:
    try:
        file = open_record(path, most_bytes=MOST_BYTES_OF_LINES)
    except FileNotFoundError:
        return
    with file:
        yield from (line for line in file if len(line) > 1)


def _look_in(line: bytes) -> Look | None:
    record = json_line(line)
    return None if record is None else look_of(record)


def _mark(line: Mapping[str, Any]) -> Mark | None:
    numbers = {name: _number(line.get(name)) for name in ("attempt", "at", "step")}
    if line.get("kind") not in _KINDS or None in numbers.values():
        return None
    phases, interval = line.get("phases"), line.get("interval")
    return Mark(
        kind=line["kind"],
        attempt=int(line["attempt"]),
        at=float(line["at"]),
        step=int(line["step"]),
        world_size=_whole(line.get("world_size")),
        num_gpus=_whole(line.get("num_gpus")),
        seconds=_number(line.get("seconds")),
        num_steps=_whole(line.get("num_steps")),
        phases=_numbers(phases) if isinstance(phases, dict) else {},
        interval=_numbers(interval) if isinstance(interval, dict) else {},
    )


def look_of(line: Mapping[str, Any]) -> Look | None:
    """Return the comparison that a line holds; None if it holds something else."""
    lost, nodes, phases = (line.get(name) or {} for name in ("lost_s", "nodes", "phases"))
    numbers = [_number(line.get(name)) for name in ("attempt", "at", "step_s")]
    if None in numbers or not all(isinstance(one, dict) for one in (lost, nodes, phases)):
        return None
    return Look(
        attempt=int(line["attempt"]),
        at=float(line["at"]),
        step=_whole(line.get("step")),
        step_s=float(line["step_s"]),
        lost_s={int(rank): value for rank, value in _numbers(lost).items() if rank.isdecimal()},
        nodes={int(rank): str(node) for rank, node in nodes.items() if rank.isdecimal()},
        phases={name: times for name, times in phases.items() if _are_numbers(times)},
    )


def _number(value: object) -> float | None:
    """Return a finite number; JSON of Python may hold `NaN`, `Infinity`, and whole numbers that no float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if -_LARGEST <= value <= _LARGEST else None


def _whole(value: object) -> int | None:
    return None if (number := _number(value)) is None else int(number)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: number for name, value in values.items() if (number := _number(value)) is not None}


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(_number(one) is not None for one in values)
