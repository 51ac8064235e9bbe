"""Which samples each step used, as the ranks record with `train.record_samples`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.run.run_dir.paths import RunDir


@dataclass(frozen=True)
class StepsTaken:
    """All steps of a run."""

    steps: Mapping[int, tuple[int, Sequence[int]]]
    """Step -> its epoch and its samples, sorted by number, over all ranks of the newest attempt that took it."""
    num_repeated: int
    """How many steps were repeated after a failure."""


def read_steps_taken(run: RunDir) -> StepsTaken:
    """Return the steps that a run has taken."""
    by_step: dict[int, tuple[int, int, list[int]]] = {}
    attempts_of: dict[int, set[int]] = {}
    for path in sorted(run.samples.glob("attempt-*/rank-*.jsonl")):
        attempt = int(path.parent.name.removeprefix("attempt-"))
        for record in read_json_lines(path):
            step = int(record["step"])
            attempts_of.setdefault(step, set()).add(attempt)
            if attempt > by_step.get(step, (-1, 0, []))[0]:
                by_step[step] = (attempt, int(record["epoch"]), [])
            if attempt == by_step[step][0]:
                by_step[step][2].extend(record["samples"])
    steps = {step: (epoch, sorted(samples)) for step, (_, epoch, samples) in sorted(by_step.items())}
    return StepsTaken(steps, sum(len(attempts) - 1 for attempts in attempts_of.values()))


def used_twice(taken: StepsTaken) -> list[tuple[int, int]]:
    """Return each (epoch, sample) that more than one step of the run has used."""
    uses = Counter((epoch, sample) for epoch, samples in taken.steps.values() for sample in samples)
    return sorted(use for use, count in uses.items() if count > 1)
