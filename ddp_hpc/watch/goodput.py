"""How much of the time that a run had nodes for was training that counts, and what checkpoints cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ddp_hpc.run.checkpoints.save_interval import SaveInterval
from ddp_hpc.run.run_dir.timeline import Mark
from ddp_hpc.watch.attempt_times import KINDS, AttemptTime

HOUR = 3600.0
RUNNING_KINDS = KINDS[1:]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What a run's nodes did; the fields are the keys of `status --json` below `goodput`."""

    goodput: float | None
    """Training divided by all time of the nodes, without the queue; None before a run has nodes, or where their use is not known."""
    node_hours: Mapping[str, float]
    """Kind -> hours of all nodes. Hours in the queue are counted with the nodes that the job then got, but are no time of theirs."""
    gpu_hours: float
    """Hours of the GPUs that workers used, from the start of each attempt to its end."""
    steps_repeated: int
    """Steps that were trained and not kept."""
    num_failures: int
    """Attempts that ended otherwise than by their own commit or a cancellation."""

    @property
    def running_h(self) -> float:
        """Hours of all nodes, without the queue."""
        return sum(self.node_hours[kind] for kind in RUNNING_KINDS)


def goodput_of(times: Sequence[AttemptTime]) -> Goodput:
    """Add up the times of all attempts."""
    hours = {kind: sum(one.seconds[kind] * one.num_nodes for one in times) / HOUR for kind in KINDS}
    known_h = sum(hours[kind] for kind in RUNNING_KINDS if kind != "unknown")
    return Goodput(
        goodput=hours["training"] / known_h if known_h else None,
        node_hours=hours,
        gpu_hours=sum(one.length_s * one.num_gpus for one in times) / HOUR,
        steps_repeated=sum(max(0, one.reached_step - one.kept_step) for one in times),
        num_failures=sum(one.is_failure for one in times),
    )


def newest_interval(marks: Sequence[Mark], times: Sequence[AttemptTime]) -> SaveInterval | None:
    """Return the newest choice of `checkpoint.every_steps=auto`; None where there is none, or where its numbers are not whole."""
    newest = next((mark.interval for mark in reversed(marks) if mark.kind == "interval"), None)
    if newest is None:
        return None
    is_measured = bool(newest.get("is_measured"))
    values = {**newest, "costs": newest, "is_measured": is_measured, "measured_cost": measured_cost_share(times)}
    try:
        return msgspec.convert(values, SaveInterval, strict=False)  # whole numbers are noted as floats
    except msgspec.ValidationError:
        return None


def measured_cost_share(times: Sequence[AttemptTime]) -> float | None:
    """Return the share of the time that saves, lost steps, and starts after failures have taken; None before a run has trained.

    What `SaveCosts.share` expects, as it has come. Other starts, after a preemption or a time limit, are no part of either.
    """
    after_failure = [False, *(one.is_failure for one in times)]
    starts_s = sum(one.seconds["starting"] for one, failed in zip(times, after_failure, strict=False) if failed)
    spent_s = starts_s + sum(one.seconds["saving"] + one.seconds["lost"] for one in times)
    all_s = spent_s + sum(one.seconds["training"] for one in times)
    return spent_s / all_s if all_s > 0 and any(one.trained_from is not None for one in times) else None
