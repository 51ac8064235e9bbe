"""The learning rate at each step."""

from __future__ import annotations

import pytest

from ddp_hpc.run.spec import LrScheduleSpec
from ddp_hpc.train.engine.optimizer import lr_factor

WARM = LrScheduleSpec(name="constant", warmup_steps=4)
COSINE = LrScheduleSpec(name="cosine")
COSINE_WARM = LrScheduleSpec(name="cosine", warmup_steps=4, min_factor=0.2)
STEP = LrScheduleSpec(name="step", milestones=(3, 6), gamma=0.5)
TOTAL = 12


@pytest.mark.parametrize(
    ("schedule", "step", "factor"),
    [
        (LrScheduleSpec(name="constant"), 0, 1.0),
        (LrScheduleSpec(name="constant"), 11, 1.0),
        (WARM, 0, 0.25),
        (WARM, 3, 1.0),
        (WARM, 4, 1.0),
        (COSINE, 0, 1.0),
        (COSINE, 6, 0.5),
        (COSINE, 12, 0.0),
        (COSINE, 20, 0.0),  # more steps than planned: it stays at the end
        (COSINE_WARM, 1, 0.5),
        (COSINE_WARM, 4, 1.0),
        (COSINE_WARM, 8, 0.6),
        (COSINE_WARM, 12, 0.2),
        (STEP, 2, 1.0),
        (STEP, 3, 0.5),
        (STEP, 6, 0.25),
    ],
)
def test_the_factor_follows_from_the_step(schedule: LrScheduleSpec, step: int, factor: float) -> None:
    assert lr_factor(schedule, step, TOTAL) == pytest.approx(factor)


def test_a_warm_up_longer_than_the_training_ends_below_the_peak() -> None:
    schedule = LrScheduleSpec(name="cosine", warmup_steps=100)

    factors = [lr_factor(schedule, step, 10) for step in range(10)]

    assert factors == sorted(factors)
    assert factors[-1] == pytest.approx(0.1)
