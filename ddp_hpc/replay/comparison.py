"""Holds what steps computed against what was recorded of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ddp_hpc.replay.record import Record, State

_MOST_NAMES = 3


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Something that was recorded in one way and computed in another; the fields are keys of `replay --json`."""

    step: int
    what: str
    """`samples`, `loss`, `lr`, or `checkpoint`."""
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


@dataclass
class Comparison:
    """What was compared, and what differs."""

    num_losses: int = 0
    num_steps_with_samples: int = 0
    checkpoints: list[int] = field(default_factory=list)
    largest_error: float = 0.0
    """The largest relative difference of a loss."""
    differences: list[Difference] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        return min(self.differences, key=lambda one: (one.step, _ORDER.index(one.what)), default=None)

    @property
    def is_empty(self) -> bool:
        return not (self.num_losses or self.checkpoints)


_ORDER = ("samples", "loss", "lr", "checkpoint")


def compare(recorded: Record, computed: Record, *, tolerance: float = 0.0) -> Comparison:
    """Compare what both know; with a tolerance, losses may differ by so much of their size, and states are not compared."""
    found = Comparison()
    for step in sorted(recorded.samples.keys() & computed.samples.keys()):
        found.num_steps_with_samples += 1
        if recorded.samples[step] != computed.samples[step]:
            found.differences.append(
                Difference(step=step, what="samples", recorded=recorded.samples[step], computed=computed.samples[step])
            )
    for step in sorted(recorded.losses.keys() & computed.losses.keys()):
        found.num_losses += 1
        for what, before in recorded.losses[step].items():
            after = computed.losses[step].get(what, math.nan)
            error = _error(before, after)
            found.largest_error = max(found.largest_error, error) if what == "loss" else found.largest_error
            if error > tolerance:
                found.differences.append(Difference(step=step, what=what, recorded=before, computed=after))
    if not tolerance:
        for step in sorted(recorded.states.keys() & computed.states.keys()):
            found.checkpoints.append(step)
            names = tuple(differing_names(recorded.states[step], computed.states[step]))
            if names:
                found.differences.append(
                    Difference(step=step, what="checkpoint", recorded=None, computed=None, names=names)
                )
    return found


def _error(before: float, after: float) -> float:
    """Return the relative difference; 0 for two values that are not finite in the same way."""
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
