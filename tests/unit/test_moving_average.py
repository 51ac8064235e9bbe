"""The moving average of a model's weights."""

from __future__ import annotations

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


def test_the_average_has_the_bits_of_pytorchs_averaged_model() -> None:
    torch.manual_seed(0)
    model = Mixed()
    ours, theirs = MovingAverage(model, 0.9), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    for _ in range(5):
        with torch.no_grad():
            for one in [*model.parameters(), *model.buffers()]:
                one.copy_(torch.randn(one.shape) * 100)
        ours.update(model)
        theirs.update_parameters(model)

    pairs = [*zip(ours.module.state_dict().items(), theirs.module.state_dict().items(), strict=True)]
    assert len(pairs) == 10
    assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)
    assert ours.num_updates == int(theirs.n_averaged)
