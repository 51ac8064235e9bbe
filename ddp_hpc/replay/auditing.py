"""Computes random segments of a run between its checkpoints again, and says which do not come out the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ddp_hpc.errors import CorruptCheckpointError, NotComputedError
from ddp_hpc.replay.comparison import Difference
from ddp_hpc.replay.history import History
from ddp_hpc.replay.replaying import Asked, Report, replay

Verdict = Literal["the same", "different", "not compared", "damaged", "failed"]


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps between two states on record, and what became of them; the fields are keys of `audit --json`."""

    start: int
    end: int
    verdict: Verdict
    first: Difference | None = None
    problem: str = ""
    """Why it could not be computed again."""


@dataclass(kw_only=True)
class AuditReport:
    """The result; the fields are the keys of `audit --json`."""

    run: str
    verdict: Literal["PASS", "FAIL", "UNKNOWN"]
    """UNKNOWN: nothing differs, but a segment could not be computed or compared."""
    segments: list[Segment]
    num_segments: int
    """How many there are."""
    num_steps: int
    """Steps of the segments that came out the same."""
    last_step: int
    seed: int
    notes: list[str] = field(default_factory=list)


def segments_of(history: History) -> list[tuple[int, int]]:
    """Return the steps between neighbouring states on record: the beginning, the checkpoints, the newest step."""
    steps = sorted({0, *history.committed, history.last_step})
    return [*pairwise(steps)]


def chosen(segments: Sequence[tuple[int, int]], number: int, seed: int) -> list[tuple[int, int]]:
    """Return `number` of the segments at random, the same ones for the same seed."""
    return sorted(random.Random(seed).sample(list(segments), min(number, len(segments))))


def audit(  # noqa: PLR0913  which segments, with which code
    history: History,
    environ: Mapping[str, str],
    *,
    number: int,
    seed: int,
    code: Path | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> AuditReport:
    """Compute segments again; a segment without a record to compare with does not pass.

    Raises:
        ConfigError: if the run cannot be computed again here.
    """
    segments = segments_of(history)
    notes: list[str] = []
    found = []
    for start, end in chosen(segments, number, seed):
        segment, report = _audited(Asked(history=history, start=start, end=end, code=code), environ, say)
        found.append(segment)
        notes += [note for note in (report.notes if report else []) if note not in notes]
    verdicts = {one.verdict for one in found}
    is_bad = verdicts & {"different", "damaged"}
    return AuditReport(
        run=str(history.run.path),
        verdict="FAIL" if is_bad else "PASS" if verdicts == {"the same"} else "UNKNOWN",
        segments=found,
        num_segments=len(segments),
        num_steps=sum(one.end - one.start for one in found if one.verdict == "the same"),
        last_step=history.last_step,
        seed=seed,
        notes=notes,
    )


def _audited(asked: Asked, environ: Mapping[str, str], say: Callable[[str], object]) -> tuple[Segment, Report | None]:
    try:
        report, _ = replay(asked, environ, say=say)
    except CorruptCheckpointError as error:
        return Segment(start=asked.start, end=asked.end, verdict="damaged", problem=str(error)), None
    except NotComputedError as error:
        return Segment(start=asked.start, end=asked.end, verdict="failed", problem=str(error)), None
    return Segment(start=asked.start, end=asked.end, verdict=report.verdict, first=report.first), report
