"""Whether a run has survived a fault: one check after another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddp_hpc.watch.samples import Taken, used_twice


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a drill left in its two runs."""

    is_graceful: bool
    restarts: bool
    every_steps: int
    """Of the checkpoints."""
    more_attempts: int
    """After the fault."""
    digest: str
    unbroken_digest: str
    taken: Taken
    unbroken_taken: Taken


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    is_good: bool
    told: str


def check(found: Found) -> list[Check]:
    """Return what holds and what does not."""
    return [*_restarts(found), *_losses(found), _digest(found), _samples(found)]


def _restarts(found: Found) -> Iterator[Check]:
    is_good = bool(found.more_attempts) == found.restarts
    yield Check("starts again" if found.restarts else "goes on", is_good, f"{found.more_attempts} more attempts")


def _losses(found: Found) -> Iterator[Check]:
    lost = found.taken.num_repeated
    may_lose = 0 if found.is_graceful or not found.restarts else 2 * found.every_steps  # a save may be under way
    yield Check("lost steps", lost <= may_lose, f"{lost}, at most {may_lose}")


def _digest(found: Found) -> Check:
    is_same = found.digest == found.unbroken_digest
    told = found.digest if is_same else f"{found.digest}, not the unbroken run's {found.unbroken_digest}"
    return Check("same bits", is_same, told)


def _samples(found: Found) -> Check:
    mine, others = found.taken.steps, found.unbroken_taken.steps
    twice = used_twice(found.taken)
    other = [step for step in sorted({*mine, *others}) if mine.get(step) != others.get(step)]
    if not others:
        return Check("each sample once", False, "the unbroken run has recorded none")
    if twice or other:
        return Check("each sample once", False, f"twice: {_few(twice)}; steps with others: {_few(other)}")
    return Check("each sample once", True, f"in {len(mine)} steps")


def _few(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:3])) or "none"
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"
