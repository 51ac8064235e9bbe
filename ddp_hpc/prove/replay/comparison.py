"""Holds what steps computed against what was recorded of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ddp_hpc.prove.replay.record import Record, State

T = TypeVar("T")
_MOST_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Something that was recorded in one way and computed in another; the fields are keys of `replay --json`."""

    step: int
    what: str
    """`samples`, `loss`, `lr`, `digest` (of what all ranks have equal), or `checkpoint`."""
    recorded: Any
    computed: Any
    names: tuple[str, ...] = ()
    """Of a checkpoint, the tensors and numbers that differ."""

    def __str__(self) -> str:
        """Return it as a part of a sentence."""
        if self.what == "checkpoint":
            more = f" and {len(self.names) - _MOST_NAMES} more" if len(self.names) > _MOST_NAMES else ""
            return f"the checkpoint differs in {', '.join(self.names[:_MOST_NAMES])}{more}"
        return f"{self.what}: {self.recorded} recorded, {self.computed} computed again"


@dataclass(kw_only=True)
class Comparison:
    """What was compared, and what differs."""

    num_losses: int = 0
    num_steps_with_samples: int = 0
    num_digests: int = 0
    checkpoints: list[int] = field(default_factory=list)
    largest_error: float = 0.0
    """The largest relative difference of a loss."""
    same_state_at: int | None = None
    """The newest step before the first difference whose digest or checkpoint is the same; None: no state is known to be."""
    first: Deviation | None = None
    differences: list[Deviation] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.num_losses or self.num_digests or self.checkpoints)


_ORDER = ("samples", "loss", "lr", "digest", "checkpoint")


def compare(recorded: Record, computed: Record, *, tolerance: float = 0.0) -> Comparison:
    """Compare what both know; with a tolerance, losses may differ by so much of their size, and states are not compared."""
    samples, all_losses = _pairs(recorded.samples, computed.samples), _pairs(recorded.losses, computed.losses)
    digests = [] if tolerance else _pairs(recorded.digests, computed.digests)
    states = [] if tolerance else _pairs(recorded.states, computed.states)
    differing: list[tuple[str, int, Any, Any]] = [("samples", *one) for one in samples if one[1] != one[2]]
    errors = [0.0]
    for step, before, after in all_losses:
        for what, value in before.items():
            error = _error(value, after.get(what))
            errors += [error] if what == "loss" else []
            differing += [(what, step, value, after.get(what))] if error > tolerance else []
    differing += [("digest", *one) for one in digests if one[1] != one[2]]
    found = [Deviation(step=step, what=what, recorded=one, computed=other) for what, step, one, other in differing]
    for step, state, again in states:
        if names := tuple(differing_names(state, again)):
            found.append(Deviation(step=step, what="checkpoint", recorded=None, computed=None, names=names))
    first = min(found, key=lambda one: (one.step, _ORDER.index(one.what)), default=None)
    same = [step for step, one, other in digests if one == other] + [step for step, *_ in states]
    return Comparison(
        num_losses=len(all_losses),
        num_steps_with_samples=len(samples),
        num_digests=len(digests),
        checkpoints=[step for step, *_ in states],
        largest_error=max(errors),
        same_state_at=max((step for step in same if first is None or step < first.step), default=None),
        first=first,
        differences=found,
    )


def _pairs(one: Mapping[int, T], other: Mapping[int, T]) -> list[tuple[int, T, T]]:
    """Return the steps that both have, with their values."""
    return [(step, one[step], other[step]) for step in sorted(one.keys() & other.keys())]


def _error(before: float | None, after: float | None) -> float:
    """Return the relative difference; 0 for two values that are not finite in the same way.

    None is what a log line has for a number that is not finite.
    """
    if before is None or after is None:
        return 0.0 if before is after else math.inf
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0.0
    error = abs(before - after) / max(abs(before), abs(after))
    return error if math.isfinite(error) else math.inf


def differing_names(one: State, other: State) -> Iterator[str]:
    """Yield the names of tensors and numbers that two states do not share."""
    for name in sorted({*one.tensors, *other.tensors}):
        if one.tensors.get(name) != other.tensors.get(name):
            yield name
    for name in sorted(one.numbers.keys() & other.numbers.keys()):
        if one.numbers[name] != other.numbers[name]:
            yield name
