"""Checks whether a run survived a fault. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_hpc.prove.drill.faults import Fault
from ddp_hpc.watch.samples import StepsTaken, used_twice


@dataclass(frozen=True)
class Check:
    """One condition that must hold."""

    name: str
    is_good: bool
    told: str
    """What was measured. The name is a key of `drill --json`."""


def check(
    fault: Fault,
    *,
    every_steps: int,
    more_attempts: int,
    digests: tuple[str, str],
    taken: tuple[StepsTaken, StepsTaken],
) -> list[Check]:
    """Return all checks, those that hold and those that do not.

    `every_steps` is `checkpoint.every_steps`, and `more_attempts` is how many began after the fault. `digests` and `taken` are of
    the run with the fault, and of the one without.
    """
    lost, (mine, other) = taken[0].num_repeated, digests
    # Twice the interval: the newest save may not have been committed yet when the fault came.
    may_lose = 0 if fault.is_graceful or not fault.restarts else 2 * every_steps
    told = f"the last checkpoint has the hash {mine} in the run with the fault, {other} in the one without"
    return [
        Check(
            "starts again" if fault.restarts else "goes on",
            bool(more_attempts) == fault.restarts,
            f"{more_attempts} attempts began after the fault, where {'some' if fault.restarts else 'none'} should",
        ),
        Check("lost steps", lost <= may_lose, f"{lost} steps had to be trained again, at most {may_lose} may be"),
        Check("same bits", mine == other, mine if mine == other else told),
        _samples(*taken),
    ]


def _samples(taken: StepsTaken, unbroken: StepsTaken) -> Check:
    mine, others, twice = taken.steps, unbroken.steps, used_twice(taken)
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
