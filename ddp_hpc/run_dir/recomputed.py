"""What follows from the results of ranks that have computed the same batch several times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ddp_hpc.run_dir.differences import Difference, by_vote


def is_nondeterministic(results: Sequence[Sequence[str]]) -> bool:
    """Tell whether the results, by rank, prove nothing.

    So it is where several ranks do not find the same each time, or one, while the others do not agree.
    """
    unsteady = _unsteady(results)
    return bool(unsteady) and (len(unsteady) > 1 or len(_others(results, unsteady)) > 1)


def by_recomputation(difference: Difference, results: Sequence[Sequence[str]]) -> Difference:
    """Return the difference with the ranks that were wrong, where the results of all of them tell.

    A rank that alone does not find the same each time was wrong, if the others agree. Where each finds the same each time, more than half of
    the ranks decide.
    """
    unsteady = _unsteady(results)
    if not unsteady:
        return by_vote(difference)
    if is_nondeterministic(results):
        return difference
    return replace(difference, odd_ranks=unsteady, told_by="itself", told_in=difference.attempt)


def _others(results: Sequence[Sequence[str]], unsteady: Sequence[int]) -> set[tuple[str, ...]]:
    return {tuple(of_rank) for rank, of_rank in enumerate(results) if rank not in unsteady}


def _unsteady(results: Sequence[Sequence[str]]) -> tuple[int, ...]:
    return tuple(rank for rank, of_rank in enumerate(results) if len(set(of_rank)) > 1)
