"""Finds the steps of a training in its sequence of collectives, without knowing the training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import sub
from statistics import median

LEAST_REPETITIONS = 5
"""How often a kind of collective must come before it can be the beginning of a step."""
GAP_TOLERANCE = 0.5
"""How many more or fewer collectives may lie between two beginnings than usually: a loss or a stop flag comes once in some steps."""
LEAST_COVERED = 0.75
"""The share of the time that lies between beginnings which are as far apart as usually, in collectives or in time."""
LEAST_ALIKE = 0.7
"""The share of the steps that take between `1 / MOST_LONGER` and `MOST_LONGER` times as long as the middle one."""
MOST_LONGER = 2.5
MOST_BREAKS = 2
"""How many of the longest distances are left out: an evaluation or a save may lie in them."""


def step_starts(kinds: Sequence[int], times: Sequence[float]) -> list[int]:
    """Return the indices at which steps begin; empty where the sequence does not repeat.

    A step begins at a kind of collective that comes once in each repetition; of several such, at the one before which the
    ranks launch nothing for longest. Where all collectives are alike, a step begins after each long pause.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for index, kind in enumerate(kinds):
        found[kind].append(index)
    gaps = {kind: _usual_gap(indices, times) for kind, indices in found.items()}
    shortest = min((gap for gap in gaps.values() if gap), default=0.0)
    pauses = [0.0, *map(sub, times[1:], times)]
    if shortest == 1:
        return _after_pauses(pauses)
    once = [kind for kind, gap in gaps.items() if gap and gap <= shortest * (1 + GAP_TOLERANCE / 2)]
    if not once:
        return []
    return found[max(once, key=lambda kind: median(pauses[index] for index in found[kind]))]


def _usual_gap(indices: Sequence[int], times: Sequence[float]) -> float:
    """Return how many collectives lie between two of one kind, if that is regular; else 0."""
    if len(indices) < LEAST_REPETITIONS:
        return 0.0
    gaps = [after - before for before, after in pairwise(indices)]
    lengths = [times[after] - times[before] for before, after in pairwise(indices)]
    usual_gap, usual = median(gaps), median(lengths)
    pairs = sorted(zip(gaps, lengths, strict=True), key=lambda pair: pair[1])[:-MOST_BREAKS]
    alike = [usual / MOST_LONGER <= length <= usual * MOST_LONGER for _, length in pairs]
    both = zip(pairs, alike, strict=True)
    covered = sum(
        length for (gap, length), is_alike in both if is_alike or abs(gap - usual_gap) <= GAP_TOLERANCE * usual_gap
    )
    whole = sum(length for _, length in pairs)
    is_regular = covered >= LEAST_COVERED * whole and sum(alike) >= LEAST_ALIKE * len(pairs)
    return usual_gap if is_regular else 0.0


def _after_pauses(pauses: Sequence[float]) -> list[int]:
    """Return the indices after long pauses: at least half as long as those in which a quarter of the time passes."""
    longest = sorted(pauses[1:], reverse=True)[MOST_BREAKS:]
    passed = [*accumulate(longest)]
    if not passed:
        return []
    long = next(pause for pause, so_far in zip(longest, passed, strict=True) if so_far >= passed[-1] / 4)
    return [index for index in range(1, len(pauses)) if pauses[index] >= long / 2]
