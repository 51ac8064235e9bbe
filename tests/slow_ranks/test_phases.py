"""How long the loop's phases take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.recipe import Recipe
from tests.strange.one_process import prepared


class Data(Dataset[Any]):
    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._clock[0] += 1.0
        return torch.ones(3), torch.ones(2)


class Net(nn.Linear):
    def __init__(self, clock: list[float]) -> None:
        super().__init__(3, 2)
        self._clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self._clock[0] += 10.0
        return super().forward(x)


def test_the_loop_counts_its_steps_and_the_time_of_each_phase_where_it_passes(tmp_path: Path) -> None:
    clock = [0.0]
    recipe = Recipe(model=Net(clock), train_data=Data(clock), loss=nn.functional.mse_loss)
    training = prepared(tmp_path / "run", recipe, train__max_steps=12, checkpoint__every_steps=None)
    training.phases = type(training.phases)(clock=lambda: clock[0])
    training.phases.enter("data")

    assert train(training)
    training.recorder.close()

    found = training.phases.times_so_far()
    assert found.num_steps == 12
    assert found.seconds["forward"] == 120.0
    assert found.seconds["data"] == 4.0 * 12
    assert sum(found.seconds.values()) == clock[0]
