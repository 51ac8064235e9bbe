"""Which faults a storm brings, and when: a function of its seed. Pure.

The plan of a seed is always the same. What it meets is not: how far a run has come when a fault arrives depends on how
fast the machine is, so the same seed may find a bug on one day and miss it on the next.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault."""

    weight: int
    """How often it comes, beside the others."""
    lasts_s: tuple[float, float] = (0.0, 0.0)
    """Least and most; zero for what is done in a moment."""
    blames: bool = False
    """Whether a run may rightly say of the node that it failed."""
    is_default: bool = True


KINDS: Mapping[str, Kind] = {
    "requeue": Kind(weight=3),
    "scontrol requeue": Kind(weight=3),
    "signal TERM": Kind(weight=3),
    "signal USR2": Kind(weight=3),
    "signal batch": Kind(weight=2),
    "kill rank": Kind(weight=5, blames=True),
    "kill loader": Kind(weight=2, blames=True),
    "kill agent": Kind(weight=3, blames=True),
    "kill srun": Kind(weight=2, blames=True),
    "kill supervisor": Kind(weight=3, blames=True),
    "kill shell": Kind(weight=2, blames=True, is_default=False),
    "pause rank": Kind(weight=3, lasts_s=(1, 8), blames=True),
    "pause agent": Kind(weight=2, lasts_s=(1, 15), blames=True),
    "pause srun": Kind(weight=1, lasts_s=(1, 15), blames=True),
    "pause supervisor": Kind(weight=2, lasts_s=(1, 15), blames=True),
    "freeze rank": Kind(weight=3, lasts_s=(50, 80), blames=True),
    "freeze agent": Kind(weight=1, lasts_s=(50, 80), blames=True),
    "suspend": Kind(weight=1, lasts_s=(2, 12)),
    "power": Kind(weight=3, lasts_s=(1, 45), blames=True),
    "cable": Kind(weight=3, lasts_s=(2, 45), blames=True),
    "controller": Kind(weight=2, lasts_s=(2, 30)),
    "database": Kind(weight=1, lasts_s=(2, 30)),
    "preempt": Kind(weight=3),
}
"""What a storm may bring: `pause` ends before the hang timeout (`HANG_S`), `freeze` after it.

An `agent` or `srun` is taken for what it is by `ddp_hpc.prove.drill.injector`; a `shell` is the job script's.
"""
HANG_S = 30
"""The runs' `restart.hang_timeout_s`."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a plan."""

    at_s: float
    """Since the storm began."""
    kind: str
    run: int
    """Which of the runs it hits, or whose nodes."""
    chance: float
    """From 0 to 1: chooses the node, the process, the cable, of those that are there at that time."""
    lasts_s: float = 0.0


def kinds_of(without: Collection[str] = (), only: Collection[str] = ()) -> list[str]:
    """Return the kinds that are asked for, in the table's order: `only` those, or all that come by default.

    Each may be named by its last word: `--without supervisor`.

    Raises:
        ValueError: where a name is none.
    """
    known = {name for kind in KINDS for name in (kind, kind.split()[-1])}
    unknown = sorted({*without, *only} - known)
    if unknown:
        raise ValueError(f"There is no kind {', '.join(map(repr, unknown))}. The kinds: {', '.join(KINDS)}.")

    def is_named(kind: str, names: Collection[str]) -> bool:
        return kind in names or kind.rsplit(maxsplit=1)[-1] in names

    asked = [kind for kind in KINDS if (is_named(kind, only) if only else KINDS[kind].is_default)]
    return [kind for kind in asked if not is_named(kind, without)]


def plan(seed: int, *, seconds: float, num_runs: int, gap_s: float, kinds: list[str]) -> list[Fault]:
    """Return the faults of a storm, the first first; they come `gap_s` apart on average."""
    chance = random.Random(seed)
    weights = [KINDS[kind].weight for kind in kinds]
    faults: list[Fault] = []
    at_s = chance.uniform(0, gap_s)
    while at_s < seconds:
        kind = chance.choices(kinds, weights)[0]
        lasts_s = min(chance.uniform(*KINDS[kind].lasts_s), seconds - at_s)
        run, where = chance.randrange(num_runs), chance.random()
        faults.append(Fault(at_s=at_s, kind=kind, run=run, chance=where, lasts_s=lasts_s))
        at_s += chance.expovariate(1 / gap_s)
    return faults
