"""What an optimizer writes into its parameter groups is put back, what others set there is not; and the layout of moments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.state.training_state import TrainingState, non_tensor_state
from tests.unit.made_state import CPU, put_back
from tests.unit.test_training_state import saved

LATER: list[object] = [
    *(3, 2**70, 0.1, 5e-324, -0.0, float("inf"), float("nan"), True, None, "text"),
    *((), (1, (2.5, None)), [1, (True,)], {"a": (1,)}, {2: []}),
    *(torch.tensor(number, dtype=torch.bfloat16) for number in (0.1, float("inf"))),
    *(torch.tensor(7), torch.tensor([]), torch.arange(6.0).view(2, 3).T),
    [torch.tensor(True), 1],
]


def with_options(*, num_groups: int = 2, **options: object) -> TrainingState:
    model = nn.Linear(2, 2)
    groups = [{"params": [*model.parameters()][number::num_groups], **options} for number in range(num_groups)]
    return of(model, torch.optim.SGD(groups, lr=0.1))


def of(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingState:
    return TrainingState(model=model, optimizer=optimizer, device=CPU, rank=0, world_size=1, loss_meter=torch.zeros(()))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        assert torch.equal(one, other)
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert repr(one) == repr(other)


@pytest.mark.parametrize(
    "before", [{}, {"own": "as made"}, {"own": torch.tensor(0.5)}], ids=["nothing", "text", "tensor"]
)
@pytest.mark.parametrize("value", LATER, ids=lambda one: " ".join(repr(one).split()))
def test_what_an_optimizer_writes_into_its_groups_is_back_to_the_bit_and_of_its_type(
    value: object, before: dict[str, Any]
) -> None:
    state, resumed = with_options(**before), with_options(**before)
    state.optimizer.param_groups[0]["own"] = value

    put_back(resumed, *saved(state))

    assert_same(resumed.optimizer.param_groups[0]["own"], value)
    assert repr(non_tensor_state(resumed)) == repr(non_tensor_state(state))
    assert resumed.optimizer.param_groups[1].get("own") == before.get("own")


def test_only_what_the_optimizer_changed_in_its_groups_is_put_back() -> None:
    state, resumed = with_options(mine=1, of_user=2), with_options(mine=1, of_user=3)
    unchanged = non_tensor_state(state)["optimizer"]
    state.optimizer.param_groups[1]["mine"] = 1.0
    state.optimizer.param_groups[0] |= {"lr": 0.7, "initial_lr": 0.7, "foreach": True, "fused": True}
    kept = saved(state)

    put_back(resumed, *kept)
    first, second = resumed.optimizer.param_groups

    assert "own_options" not in unchanged
    assert kept[1]["optimizer"]["own_options"] == [{}, {"mine": 1.0}]
    assert (first["of_user"], second["of_user"]) == (3, 3)
    assert (repr(first["mine"]), repr(second["mine"])) == ("1", "1.0")
    assert (first["lr"], first["foreach"], first["fused"]) == (0.1, None, None)
    assert "initial_lr" not in first


def test_a_tensor_that_groups_share_is_filled_and_so_stays_shared() -> None:
    before, after = torch.tensor(1.0), torch.tensor(1.0)
    state, resumed = with_options(both=before), with_options(both=after)
    before.add_(1)

    put_back(resumed, *saved(state))

    assert after == 2
    assert all(group["both"] is after for group in resumed.optimizer.param_groups)


def test_groups_that_began_with_one_tensor_get_two_where_the_optimizer_gave_them_different_ones() -> None:
    state, resumed = with_options(own=torch.tensor(1.0)), with_options(own=torch.tensor(1.0))
    for number, group in enumerate(state.optimizer.param_groups):
        group["own"] = torch.tensor(2.0 + number)

    put_back(resumed, *saved(state))

    assert [float(group["own"]) for group in resumed.optimizer.param_groups] == [2.0, 3.0]


def test_options_of_another_number_of_groups_are_refused_and_nothing_is_changed() -> None:
    state, resumed = with_options(), with_options(num_groups=1)
    for group in state.optimizer.param_groups:
        group["step"] = 3
    weight = resumed.model.state_dict()["weight"].clone()

    with pytest.raises(ConfigError, match=r"has 2 parameter groups, in which it keeps step, but this run's has 1\."):
        put_back(resumed, *saved(state))

    assert "step" not in resumed.optimizer.param_groups[0]
    assert torch.equal(resumed.model.state_dict()["weight"], weight)


def test_another_number_of_groups_in_which_the_optimizer_wrote_nothing_is_as_good() -> None:
    state, resumed = with_options(), with_options(num_groups=1)

    put_back(resumed, *saved(state))

    assert torch.equal(resumed.model.state_dict()["weight"], state.model.state_dict()["weight"])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            torch.zeros(2000),
            "a tensor of 2000 elements, but a checkpoint can hold only numbers, text and tensors of at most 1024",
        ),
        (object(), "a checkpoint can hold only tensors, numbers and text"),
    ],
)
def test_what_no_manifest_can_hold_is_refused(value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        non_tensor_state(with_options(own=value))


@pytest.mark.parametrize(
    "like",
    [torch.rand(()), torch.rand(0, 3), torch.rand(3, 4).T, torch.rand(2, 3, 4, 5, 6).permute(0, 4, 2, 3, 1)],
    ids=lambda one: str([*one.shape]),
)
def test_moments_come_back_in_the_layout_in_which_pytorch_makes_them(like: Tensor) -> None:
    def made() -> TrainingState:
        model = nn.ParameterList([nn.Parameter(like.clone())])
        return of(model, torch.optim.Adam(model.parameters(), fused=True))

    state, resumed = made(), made()
    parameter = state.optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.rand_like(parameter)
    state.optimizer.step()

    put_back(resumed, *saved(state))
    [before], [after] = state.optimizer.state.values(), resumed.optimizer.state.values()

    assert parameter.stride() == like.stride()
    for key, value in before.items():
        assert after[key].stride() == value.stride()
        assert torch.equal(after[key], value)
