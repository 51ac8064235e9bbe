"""Computes random segments of a run between its checkpoints again, and says which do not come out the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from ddp_hpc.base.errors import CorruptCheckpointError, NotReplayedError, UnreadableError
from ddp_hpc.prove.replay.history import History
from ddp_hpc.prove.replay.private_run import WantedSteps
from ddp_hpc.prove.replay.record import Deviation, recorded_steps
from ddp_hpc.prove.replay.replaying import ReplayReport, replay
from ddp_hpc.run.run_dir.replays import ReplayRequest

Verdict = Literal["the same", "losses only", "different", "not compared", "damaged", "unreadable", "failed"]
"""`losses only`: these are the same, within a tolerance or exactly, and no state at the end was compared."""
_VERDICT_BY_ERROR: Mapping[type[Exception], Verdict] = {
    CorruptCheckpointError: "damaged",
    NotReplayedError: "failed",
    UnreadableError: "unreadable",
    OSError: "unreadable",
}


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps between two states on record, and what became of them; the fields are keys of `audit --json`."""

    start: int
    end: int
    verdict: Verdict
    first: Deviation | None = None
    problem: str = ""
    """Why it could not be computed again."""


@dataclass(kw_only=True)
class AuditReport:
    """The result; the fields are the keys of `audit --json`."""

    run: str
    verdict: Literal["PASS", "FAIL", "UNKNOWN"]
    """UNKNOWN: nothing differs, but not every chosen segment has a state at its end that is known to be the same."""
    segments: list[Segment]
    num_segments: int
    """How many there are."""
    num_steps: int
    """Steps of the segments that came out the same."""
    last_step: int
    seed: int
    notes: list[str] = field(default_factory=list)


def segments_of(history: History, digests: Iterable[int] = ()) -> list[tuple[int, int]]:
    """Return the steps between neighbouring states on record: the beginning, the checkpoints, the newest digest after them."""
    newest = max({*history.committed, *digests}, default=0)
    return [*pairwise(sorted({0, *history.committed, newest}))]


def verdict_of(found: Sequence[Segment]) -> Literal["PASS", "FAIL", "UNKNOWN"]:
    """Return what the segments say together."""
    verdicts = {one.verdict for one in found}
    if verdicts & {"different", "damaged"}:
        return "FAIL"
    return "PASS" if verdicts == {"the same"} else "UNKNOWN"


def choose_segments(segments: Sequence[tuple[int, int]], number: int, seed: int) -> list[tuple[int, int]]:
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
    """Compute segments again; a segment at whose end no state can be compared does not pass."""
    segments = segments_of(history, recorded_steps(history.run, 0, history.last_step).digests)
    last = segments[-1][1] if segments else 0
    notes: list[str] = []
    if last < history.last_step:
        notes.append(
            f"steps {last + 1} to {history.last_step} have no checkpoint or digest after them yet, so they are in no segment"
        )
    found = []
    for start, end in choose_segments(segments, number, seed):
        try:
            wanted = WantedSteps(history=history, start=start, request=ReplayRequest(end_step=end), code=code)
            report = replay(wanted, environ, say=say)
        except tuple(_VERDICT_BY_ERROR) as error:  # a run that trains prunes its checkpoints meanwhile
            verdict = next(verdict for kind, verdict in _VERDICT_BY_ERROR.items() if isinstance(error, kind))
            found.append(Segment(start=start, end=end, verdict=verdict, problem=str(error)))
        else:
            found.append(judge_segment(report))
            notes += [note for note in report.notes if note not in notes]
    return AuditReport(
        run=str(history.run.path),
        verdict=verdict_of(found),
        segments=found,
        num_segments=len(segments),
        num_steps=sum(one.end - one.start for one in found if one.verdict == "the same"),
        last_step=history.last_step,
        seed=seed,
        notes=notes,
    )


def judge_segment(report: ReplayReport) -> Segment:
    """Return what a replay says of its segment."""
    verdict: Verdict = report.verdict
    problem = ""
    if verdict == "the same" and report.same_state_at != report.to_step:
        verdict = "losses only"
        exactly = f"within {report.tolerance:g} of their size" if report.tolerance else "exactly"
        problem = f"the losses are the same {exactly}, but the state at the end could not be compared"
    return Segment(start=report.from_step, end=report.to_step, verdict=verdict, first=report.first, problem=problem)
