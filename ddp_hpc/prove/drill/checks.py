"""Checks whether a run survived a fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.watch.samples import StepsTaken, used_twice


@dataclass(frozen=True, kw_only=True)
class DrillOutcome:
    """What the two runs of a drill recorded."""

    is_graceful: bool
    restarts: bool
    every_steps: int
    """`checkpoint.every_steps` of the run with the fault."""
    more_attempts: int
    """Attempts that began after the fault."""
    digest: str
    unbroken_digest: str
    taken: StepsTaken
    unbroken_taken: StepsTaken


@dataclass(frozen=True)
class Check:
    """One condition that must hold."""

    name: str
    is_good: bool
    told: str
    """What was measured. The name is a key of `drill --json`."""


def check(outcome: DrillOutcome) -> list[Check]:
    """Return all checks, those that hold and those that do not."""
    more, lost = outcome.more_attempts, outcome.taken.num_repeated
    # Twice the interval: the newest save may not have been committed yet when the fault came.
    may_lose = 0 if outcome.is_graceful or not outcome.restarts else 2 * outcome.every_steps
    is_same = outcome.digest == outcome.unbroken_digest
    digests = f"the last checkpoint has the hash {outcome.digest} in the run with the fault, {outcome.unbroken_digest} in the one without"
    return [
        Check(
            "starts again" if outcome.restarts else "goes on",
            bool(more) == outcome.restarts,
            f"{more} attempts began after the fault, where {'some' if outcome.restarts else 'none'} should",
        ),
        Check("lost steps", lost <= may_lose, f"{lost} steps had to be trained again, at most {may_lose} may be"),
        Check("same bits", is_same, outcome.digest if is_same else digests),
        _samples(outcome),
    ]


def _samples(outcome: DrillOutcome) -> Check:
    mine, others = outcome.taken.steps, outcome.unbroken_taken.steps
    twice = used_twice(outcome.taken)
    other = [step for step in sorted({*mine, *others}) if mine.get(step) != others.get(step)]
    if not others:
        told = "the run without a fault did not record its samples; set `train.record_samples=true` in it"
    elif twice or other:
        told = f"samples used twice (epoch, sample): {_few(twice)}; steps with other samples than the run without a fault: {_few(other)}"
    else:
        told = f"checked in {len(mine)} steps"
    return Check("each sample once", bool(others) and not twice and not other, told)


def _few(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:3])) or "none"
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"
