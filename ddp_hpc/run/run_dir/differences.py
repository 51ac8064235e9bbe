"""The record of a difference between ranks: what they had after a step at which all must be equal, and which of them was wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddp_hpc.base.durable import numbers_in_names
from ddp_hpc.base.names import shorten_names
from ddp_hpc.base.patience import ask_once
from ddp_hpc.base.record import try_read_record, write_record
from ddp_hpc.run.run_dir.paths import ATTEMPT, RunDir

_MOST_NAMED = 4

ProofKind = Literal["", "vote", "repetition", "undecided"]
"""How it is known which ranks were wrong. Empty: it is not known, and the step has not been computed again. vote: more than half of
the ranks agree. repetition: another attempt has computed the step again, and its values are those of the other ranks, or clearly near
them; this counts more than a vote, which several ranks that are wrong alike may win. undecided: it has, and its values do not tell."""

FINITE, NOT_FINITE = "finite", "not finite"


@dataclass(frozen=True, kw_only=True)
class TensorSample:
    """Some elements of a tensor that ranks do not have equal."""

    tensor: str
    places: tuple[int, ...]
    """Their places among all elements, row by row."""
    values: tuple[tuple[float, ...], ...]
    """By rank, and in the order of `places`."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What the ranks of an attempt had after a step."""

    attempt: int
    step: int
    digests: tuple[str, ...]
    """Of all that must be equal, by rank."""
    hosts: tuple[str, ...]
    """By rank."""
    processors: tuple[str, ...]
    """What each rank computed on: the name of its GPU or CPU."""
    tensors: tuple[str, ...]
    """The first tensors that are not equal on all ranks."""
    num_tensors: int
    """How many these are."""
    at: float
    """Seconds since the epoch."""
    samples: tuple[TensorSample, ...] = ()
    unlike: str = ""
    """Which tensor some ranks do not have, or have in another shape or dtype: no wrong bit does that, so it is the code. Else empty."""
    of_loss: bool = False
    """Whether it is the loss of the step that was not finite on some ranks alone. The digests say of which: `FINITE`, `NOT_FINITE`."""
    odd_ranks: tuple[int, ...] = ()
    """The ranks that were wrong, where that is known."""
    told_by: ProofKind = ""
    told_in: int | None = None
    """The attempt whose digests show it."""
    repeated_in: int | None = None
    """The first later attempt that has computed the step again, without a difference."""
    of_gradients: bool = False
    """Whether it is of gradients of one batch, which ranks compared until 2026-11-26."""
    not_comparable: str = ""
    """Why its values cannot tell who was wrong: what it computed with was not the same. Else empty."""

    @property
    def is_open(self) -> bool:
        """Tell whether to compare after the same step again, to learn which ranks were wrong."""
        is_told = self.repeated_in is not None or self.told_by not in {"", "vote"}
        return not (is_told or self.unlike or self.of_loss or self.is_of_processors)

    @property
    def is_of_processors(self) -> bool:
        """Tell whether ranks with equal processors are equal, and there are several kinds: these may round differently."""
        num_kinds = len(set(self.processors))
        return num_kinds > 1 and len(set(zip(self.processors, self.digests, strict=True))) == num_kinds

    @property
    def finding(self) -> str:
        """Say after which step which tensors differ."""
        if self.of_loss:
            return f"the ranks differ after step {self.step}: the loss is not finite {self.not_finite_ranks_text}"
        others = self.num_tensors - 1
        more = "" if others < 1 else " and 1 other tensor" if others == 1 else f" and {others} other tensors"
        are = "are" if more else "is"
        return f"the ranks differ after step {self.step}: `{self.tensors[0]}`{more} {are} not equal on all of them, but must be"

    @property
    def not_finite_ranks_text(self) -> str:
        """Say on which ranks the loss is not finite."""
        bad = [f"rank {rank} on {self.hosts[rank]}" for rank, one in enumerate(self.digests) if one == NOT_FINITE]
        return f"on {shorten_names(bad, _MOST_NAMED)} alone"

    @property
    def blame(self) -> str:
        """Say which ranks were wrong, or why that is not known."""
        if self.unlike:
            return f"{self.unlike}, so the code does not do the same on each rank"
        if self.odd_ranks:
            named = shorten_names([f"rank {rank} on {self.hosts[rank]}" for rank in self.odd_ranks], _MOST_NAMED)
            were = "was wrong" if len(self.odd_ranks) == 1 else "were wrong"
            return f"{named} {were} ({self._proof_text})"
        if self.told_by == "undecided":
            return f"{self._repetition_text}, but its values do not show which rank was wrong, because {self._why_undecided}"
        if self.of_loss:
            return "a processor was wrong, or the training diverges; the next attempt computes the step again, which shows what it was"
        if self.is_of_processors:
            kinds = shorten_names(list(dict.fromkeys(self.processors)), _MOST_NAMED)
            return (
                f"ranks on the same kind of processor are equal, and there are several kinds ({kinds}), which may round "
                "differently: ask for one kind (`resources.gpu_type`, `slurm.constraint`), or switch the comparison off with `integrity.every_steps=null`"
            )
        num, groups = len(self.digests), len(set(self.digests))
        return (
            f"{num} ranks have {groups} different values, and no more than half of them agree, so it is not known which are "
            "wrong until the step is computed again"
        )

    @property
    def _proof_text(self) -> str:
        num, num_odd = len(self.digests), len(self.odd_ranks)
        agree = f"{num - num_odd} of {num} ranks agree"
        if self.told_by == "vote":
            doubt = f"; {self._repetition_text}, but its values cannot confirm this, because {self._why_undecided}"
            return agree if self.repeated_in is None else agree + doubt
        again = f"attempt {self.told_in} computed the step again"
        if self.of_loss:
            return f"{again}, and its losses are finite"
        if num_odd * 2 > num:
            return f"{again}, and its result equals that of the minority of ranks"
        return f"{agree}, and {again}" if num_odd * 2 < num and _majority_digest(self.digests) else again

    @property
    def _repetition_text(self) -> str:
        return f"attempt {self.repeated_in if self.repeated_in is not None else self.told_in} computed the step again without a difference"

    @property
    def _why_undecided(self) -> str:
        return self.not_comparable or (
            "the difference is small or many steps old, or the data or the code is not deterministic"
        )


def _majority_digest(digests: Sequence[str]) -> str:
    """Return what more than half of the ranks have; empty where no more than half agree."""
    digest, count = Counter(digests).most_common(1)[0]
    return digest if count * 2 > len(digests) else ""


def judge_by_vote(difference: Difference) -> Difference:
    """Return the difference with the ranks that were wrong, if more than half of the ranks agree."""
    digest = _majority_digest(difference.digests)
    if not digest or difference.is_of_processors or difference.unlike:
        return difference
    odd = tuple(rank for rank, one in enumerate(difference.digests) if one != digest)
    return replace(difference, odd_ranks=odd, told_by="vote", told_in=difference.attempt)


def judge_by_repetition(
    difference: Difference,
    attempt: int,
    digest: str,
    values: Mapping[str, Sequence[float]],
    *,
    not_comparable: str = "",
) -> Difference:
    """Return the difference with the ranks that were wrong, by what another attempt, whose ranks were equal, found after its step.

    `values` are by tensor, at the places of the samples. `not_comparable` is what that attempt computed with, and that of the difference
    did not; empty if both had the same.

    A rank whose digest was found again was right. A wrong rank's gradients have reached all ranks, so often none has exactly what the
    other attempt found. Soon after the fault, the values of the other ranks are near. Many steps later, or where the fault was small, any rank may
    be the nearest by chance, so one that is not clearly near or far leaves it undecided. Then a vote stands.
    """
    odd = tuple(rank for rank, one in enumerate(difference.digests) if one != digest)
    if not_comparable:
        odd = ()
    elif len(odd) == len(difference.digests):
        odd = _odd_ranks_by_values(difference, values)
    repeated = replace(difference, repeated_in=attempt, not_comparable=not_comparable)
    if odd:
        return replace(repeated, odd_ranks=odd, told_by="repetition", told_in=attempt)
    return repeated if difference.told_by == "vote" else replace(repeated, told_by="undecided", told_in=attempt)


def _odd_ranks_by_values(difference: Difference, found: Mapping[str, Sequence[float]]) -> tuple[int, ...]:
    kinds = [
        _nearness_of_ranks(values, value)
        for sample in difference.samples
        for values, value in zip(zip(*sample.values, strict=True), found.get(sample.tensor, ()), strict=False)
    ]
    counts = [Counter(of_rank).most_common(1)[0] for of_rank in zip(*kinds, strict=True)]
    by_rank = [kind if count >= _LEAST_PLACES_SHARE * len(kinds) else "" for kind, count in counts]
    return tuple(rank for rank, kind in enumerate(by_rank) if kind == "far") if set(by_rank) == {"near", "far"} else ()


_Nearness = Literal["near", "far", ""]
_NEAR, _FAR = 1e-3, 0.5
"""Distances from what was found, in parts of the spread: of the longest distance between two ranks."""
_LEAST_SPREAD = 1024 * 2.0**-23
"""In parts of the largest value: 1024 units in the last place of a float32. Rounding makes smaller ones within a few steps."""
_LEAST_PLACES_SHARE = 0.95
"""Of the places."""


def _nearness_of_ranks(values: Sequence[float], found: float) -> list[_Nearness]:
    """Return whether each rank's value is near what was found, or far from it; nothing where the spread is too small to tell."""
    finite = [value for value in values if math.isfinite(value)]
    spread = max(finite) - min(finite) if len(finite) == len(values) else math.inf
    if not math.isfinite(spread):  # a value that is not finite is far from all others; these must be near by themselves
        spread = abs(found)
        return [_nearness(abs(value - found), spread) if math.isfinite(value) else "far" for value in values]
    if spread <= _LEAST_SPREAD * max(map(abs, values)):
        return [""] * len(values)
    return [_nearness(abs(value - found), spread) for value in values]


def _nearness(distance: float, spread: float) -> _Nearness:
    return "near" if distance <= _NEAR * spread else "far" if distance >= _FAR * spread else ""


def is_same_difference(before: Difference, newest: Difference) -> bool:
    """Tell whether each rank had the same values after the same step in both attempts, so that nothing happened by chance.

    Equal digests prove it whatever the attempts computed with: other data, code or numbers of ranks give other digests.
    """
    return (before.step, before.digests) == (newest.step, newest.digests)


def write_difference(run: RunDir, difference: Difference) -> None:
    """Write or replace the record of an attempt."""
    write_record(run.difference(difference.attempt), difference, indent=1)


def read_difference(run: RunDir, attempt: int) -> Difference | None:
    """Return the record of an attempt; None where its ranks did not differ in what is compared now, or the record cannot be read."""
    found = try_read_record(run.difference(attempt), Difference, may_have_nan=True)
    if found is None or found.of_gradients:
        return None
    num = len(found.digests)
    is_whole = num == len(found.hosts) == len(found.processors) and bool(found.tensors)
    return found if is_whole and all(0 <= rank < num for rank in found.odd_ranks) else None


def read_differences(run: RunDir) -> list[Difference]:
    """Return the records of all attempts, oldest first."""
    numbers: list[int] = ask_once(run.errors, lambda: numbers_in_names(run.errors, ATTEMPT), unknown=[])
    found = (read_difference(run, number) for number in numbers)
    return [one for one in found if one is not None]
