"""The optimizers of the configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ddp_hpc.spec import OptimizerSpec
from ddp_hpc.train.engine.optimizer import build_optimizer, decay_groups, why_not_fused


class Net(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def names_in(model: nn.Module, group: dict[str, Any]) -> set[str]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in group["params"]}


def test_matrices_and_filters_are_decayed_and_nothing_else() -> None:
    model = Net()

    decayed, plain = decay_groups(model, 0.1)

    assert names_in(model, decayed) == {"conv.weight", "linear.weight"}
    assert names_in(model, plain) == {"conv.bias", "norm.weight", "norm.bias", "linear.bias", "scale"}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_a_model_without_vectors_has_one_group() -> None:
    assert len(decay_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


@pytest.mark.parametrize(
    ("spec", "kind", "options"),
    [
        (OptimizerSpec(), torch.optim.SGD, {"momentum": 0.9, "nesterov": False}),
        (OptimizerSpec(nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (OptimizerSpec(nesterov=True, momentum=0.0), torch.optim.SGD, {"momentum": 0.0, "nesterov": False}),
        (
            OptimizerSpec(name="adamw", betas=(0.8, 0.9), eps=1e-6),
            torch.optim.AdamW,
            {"betas": (0.8, 0.9), "eps": 1e-6},
        ),
    ],
)
def test_options_reach_the_optimizer(spec: OptimizerSpec, kind: type, options: dict[str, Any]) -> None:
    optimizer = build_optimizer(spec, Net(), 0.3)

    assert isinstance(optimizer, kind)
    for group in optimizer.param_groups:
        assert {key: group[key] for key in options} == options
        assert (group["lr"], group["fused"]) == (0.3, False)


def with_sparse_gradients() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))


def with_complex_weights() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    ("model", "why_not"),
    [
        (Net(), ""),
        (nn.Embedding(4, 2), ""),
        (with_sparse_gradients(), "the gradients of the embedding '0' are sparse"),
        (with_complex_weights(), "the weight '0.weight' is of type torch.complex64"),
        (with_complex_weights().requires_grad_(False), ""),
    ],
    ids=["dense", "embedding", "sparse", "complex", "frozen"],
)
def test_weights_that_no_fused_kernel_updates_are_known_before_the_first_step(model: nn.Module, why_not: str) -> None:
    assert why_not_fused(model) == why_not


def _step_fused(model: nn.Module, inputs: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    model(inputs).abs().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (with_sparse_gradients(), torch.tensor([1, 2])),
        (with_complex_weights(), torch.ones(1, 2, dtype=torch.complex64)),
    ],
)
def test_pytorchs_fused_kernels_refuse_them(model: nn.Module, inputs: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="fused"):
        _step_fused(model, inputs)
