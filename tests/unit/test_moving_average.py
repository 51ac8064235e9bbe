"""The moving average of a model's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ddp_hpc.train.state.moving_average import MovingAverage


class Mixed(nn.Module):
    """Parameters and buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.tied = self.norm.weight
        self.brain = nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16))
        self.spectrum = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.arange(6), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("nothing", None)


@pytest.mark.parametrize("warms_up", [True, False])
def test_the_average_has_the_bits_of_pytorchs_averaged_model(warms_up: bool) -> None:
    torch.manual_seed(0)
    model = Mixed()

    def warmed_up(averages: Any, newest: Any, number: Any) -> None:
        get_ema_multi_avg_fn(min(0.4, (1 + int(number)) / (10 + int(number))))(averages, newest, number)

    fn = warmed_up if warms_up else get_ema_multi_avg_fn(0.4)
    ours, theirs = MovingAverage(model, 0.4), AveragedModel(model, multi_avg_fn=fn)
    ours.warms_up = warms_up

    for _ in range(8):
        with torch.no_grad():
            for one in [*model.parameters(), *model.buffers()]:
                one.copy_(torch.randn(one.shape) * 100)
        ours.update(model)
        theirs.update_parameters(model)

    pairs = [*zip(ours.module.state_dict().items(), theirs.module.state_dict().items(), strict=True)]
    assert len(pairs) == 10
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)
    assert ours.num_updates == int(theirs.n_averaged)


@pytest.mark.long
@pytest.mark.parametrize("decay", [0.9, 0.99, 0.9999])
@pytest.mark.parametrize("steps", [30, 184])
def test_the_average_of_a_short_training_with_batch_norm_is_as_good_as_the_weights(decay: float, steps: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(600, 8)
    labels = (rows @ torch.randn(8, 4)).argmax(1)
    layers = [layer for _ in range(3) for layer in (nn.LazyLinear(32), nn.LazyBatchNorm1d(), nn.ReLU())]
    model = nn.Sequential(*layers, nn.LazyLinear(4))
    model(rows)
    optimizer, average = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), MovingAverage(model, decay)

    for step in range(steps):
        optimizer.zero_grad()
        some = (torch.arange(64) + 64 * step) % 600
        nn.functional.cross_entropy(model(rows[some]), labels[some]).backward()
        optimizer.step()
        average.update(model)

    live, averaged = (float((one.eval()(rows).argmax(1) == labels).float().mean()) for one in (model, average.module))
    assert live > 0.6
    assert averaged > live - 0.05
