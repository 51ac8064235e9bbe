"""How much of the time that a run had nodes for was training that counts, and what checkpoints cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.run.checkpoints.save_interval import SaveCosts, best_interval_s
from ddp_hpc.watch.attempt_times import KINDS, AttemptTime

HOUR = 3600.0
RUNNING = KINDS[1:]


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
        return sum(self.node_hours[kind] for kind in RUNNING)


def goodput_of(times: Sequence[AttemptTime]) -> Goodput:
    """Add up the times of all attempts."""
    hours = {kind: sum(one.seconds[kind] * one.num_nodes for one in times) / HOUR for kind in KINDS}
    known_h = sum(hours[kind] for kind in RUNNING if kind != "unknown")
    return Goodput(
        goodput=hours["training"] / known_h if known_h else None,
        node_hours=hours,
        gpu_hours=sum(one.length_s * one.num_gpus for one in times) / HOUR,
        steps_repeated=sum(max(0, one.reached_step - one.kept_step) for one in times),
        num_failures=sum(one.is_failure for one in times),
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointCost:
    """What periodic checkpoints cost this run, and what another interval would have cost."""

    every_steps: int
    step_s: float
    """Time of a step, without saves."""
    stall_s: float
    """How long the loop waits for one save."""
    restart_s: float
    """From the start of an attempt until it trains; the middle one of all attempts."""
    num_failures: int
    """One is assumed where none was seen: the next may come now."""
    running_s: float

    @property
    def between_failures_s(self) -> float:
        return self.running_s / max(1, self.num_failures)

    def share(self, every_steps: int) -> float:
        """Return the expected share of the time that saves, repeated steps and restarts take."""
        costs = SaveCosts(stall_s=self.stall_s, restart_s=self.restart_s, between_failures_s=self.between_failures_s)
        return costs.share(every_steps * self.step_s)

    @property
    def best_every_steps(self) -> int:
        """The interval with the least cost."""
        return max(1, round(best_interval_s(self.stall_s, self.between_failures_s) / self.step_s))


def measured_cost(times: Sequence[AttemptTime]) -> float | None:
    """Return the share of the time that saves, lost steps, and starts after failures have taken; None before a run has trained.

    What `SaveCosts.share` expects, as it has come. Other starts, after a preemption or a time limit, are no part of either.
    """
    after_failure = [False, *(one.is_failure for one in times)]
    starts_s = sum(one.seconds["starting"] for one, failed in zip(times, after_failure, strict=False) if failed)
    spent_s = starts_s + sum(one.seconds["saving"] + one.seconds["lost"] for one in times)
    all_s = spent_s + sum(one.seconds["training"] for one in times)
    return spent_s / all_s if all_s > 0 and any(one.trained_from is not None for one in times) else None


def checkpoint_cost(times: Sequence[AttemptTime], every_steps: int | None) -> CheckpointCost | None:
    """Return what checkpoints cost; None without the measurements: a save, a step and a start are needed."""
    saves, steps = sum(one.num_saves for one in times), sum(one.num_steps for one in times)
    starts = sorted(one.seconds["starting"] for one in times if one.trained_from is not None)
    trained_s = sum(one.steps_s for one in times)
    stall_s, running_s = sum(one.stall_s for one in times), sum(one.length_s for one in times)
    if not (every_steps and running_s > 0 and saves and steps and starts and stall_s > 0 and trained_s > stall_s):
        return None
    return CheckpointCost(
        every_steps=every_steps,
        step_s=(trained_s - stall_s) / steps,
        stall_s=stall_s / saves,
        restart_s=starts[len(starts) // 2],
        num_failures=sum(one.is_failure for one in times),
        running_s=running_s,
    )
