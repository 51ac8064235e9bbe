"""The learning rate as a pure function of the step, so that it needs no state in checkpoints."""

from __future__ import annotations

import math

from ddp_hpc.run.spec import LrScheduleSpec


def lr_factor(schedule: LrScheduleSpec, step: int, total_steps: int) -> float:
    """Return the factor of the peak learning rate for step `step`, counted from zero."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "cosine":
        span = max(total_steps - schedule.warmup_steps, 1)
        done = min((step - schedule.warmup_steps) / span, 1.0)
        return schedule.min_factor + (1 - schedule.min_factor) * 0.5 * (1 + math.cos(math.pi * done))
    if schedule.name == "step":
        return schedule.gamma ** sum(step >= milestone for milestone in schedule.milestones)
    return 1.0
