"""The optimizers of the configuration."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_hpc.run.spec import OptimizerSpec
from ddp_hpc.train.engine.optimizer import add_momentum_hook, build_optimizer, decay_groups, why_not_fused


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


def stepped(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], *, skipped: set[int], prepared: bool = True
) -> list[Tensor]:
    """Take six steps under a loss scaler, of which it skips some; return the bits of weights and momentum."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=1000)
    torch.manual_seed(1)
    if prepared:
        add_momentum_hook(optimizer, may_skip=True)
    scaler.scale(torch.zeros(()))
    for step in range(6):
        for one in parameters:
            one.grad = torch.randn_like(one)
            one.grad[::2] = -0.0
            if step in skipped:
                one.grad[1] = float("inf")
            one.grad.mul_(scaler.get_scale())  # a power of two, so that nothing is rounded
        scaler.step(optimizer)
        scaler.update()
    found = [one.detach() for one in parameters]
    found += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    return [one.view(torch.int32) for one in found]


def two_parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(11)), nn.Parameter(torch.full((300,), -0.0))]


@pytest.mark.parametrize("skipped", [set(), {0}, {0, 1}, {1}, {4}, {0, 3}], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"dampening": 0.5}, {"nesterov": True}, {"weight_decay": 0.1}, {"maximize": True}], ids=str
)
def test_a_fused_sgd_begins_its_momentum_with_the_first_update_that_is_not_skipped(
    options: dict[str, Any], skipped: set[int]
) -> None:
    """Beside PyTorch's SGD that is not fused, where the loss scaler itself leaves `step` out. Gradients are -0.0, too."""
    found = []
    for kind in ({"fused": True}, {"foreach": False}):
        parameters = two_parameters()
        groups = [{"params": [one]} for one in parameters]
        optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.5, **options, **kind)
        found.append(stepped(optimizer, parameters, skipped=skipped))

    assert all(map(torch.equal, *found))


def test_where_nothing_is_skipped_a_prepared_sgd_trains_to_the_same_bits_as_one_that_is_not() -> None:
    found = []
    for prepared in (True, False):
        parameters = two_parameters()
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
        found.append(stepped(optimizer, parameters, skipped=set(), prepared=prepared))

    assert all(map(torch.equal, *found))


def test_fused_kernels_that_cannot_skip_a_first_step_are_left_out_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    optimizer = torch.optim.SGD(two_parameters(), lr=0.1, momentum=0.9, dampening=0.5, fused=True)

    add_momentum_hook(optimizer, may_skip=True)

    assert not optimizer.param_groups[0]["fused"]
    (line,) = caplog.messages
    assert "`dampening`" in line
    assert "waits for the device in each step" in line


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_other_fused_optimizers_stay_as_they_are(kind: Any) -> None:
    optimizer = kind(two_parameters(), lr=0.1, fused=True)

    add_momentum_hook(optimizer, may_skip=True)

    assert optimizer.param_groups[0]["fused"]
    assert not optimizer._optimizer_step_pre_hooks
