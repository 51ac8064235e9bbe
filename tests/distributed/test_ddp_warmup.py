"""A rehearsed backward makes the first step after a restart add gradients like the same step of an unbroken run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hpc.train.engine.ddp_warmup import copy_batch, explain_unused, warm_up_ddp
from ddp_hpc.train.process_group import Group
from tests.distributed.processes import in_group

STEPS = 6
RESTART_AFTER = 3


class Net(nn.Module):
    """Gradients arrive in another order than the parameters were made, and do not fill one chunk of a ring evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(97, 5)
        self.first = nn.Linear(31, 53)
        self.norm = nn.BatchNorm1d(53)
        self.middle = nn.Linear(53, 97)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.middle(self.norm(self.first(inputs)).relu()).relu()
        return self.last(nn.functional.dropout(hidden, 0.1))  # type: ignore[no-any-return]  # a Tensor


class Shuffled(nn.Module):
    """Calls its layers in an order drawn at random; one has sparse gradients, as wide embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 31, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(31, 31) for _ in range(6))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs + self.words(inputs[:, 0].abs().long() % 7)
        for number in torch.randperm(6).tolist():
            hidden = hidden + self.layers[number](hidden).tanh()
        return hidden  # type: ignore[no-any-return]  # a Tensor


def _train(
    group: Group, *, restarts: bool, rehearses: bool, make: Callable[[], nn.Module] = Net, keeps: bool = True
) -> list[Tensor]:
    """Walk a few steps, if asked with a new DDP wrapper halfway; return the weights and buffers."""
    torch.manual_seed(0)
    model = make()
    order: list[int] = []
    wrapped = _wrap(model, group, rehearses=rehearses, order=order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if restarts and step == RESTART_AFTER:
            torch.manual_seed(5)
            del wrapped
            gc.collect()  # a restart has no hooks of another attempt, which would act beside its own until they are freed
            wrapped = _wrap(model, group, rehearses=rehearses, order=order if keeps else [])
        torch.manual_seed(1000 * step + group.rank_info.rank)
        _backward(wrapped, step, group.rank_info.rank)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return list(model.state_dict().values())


def _wrap(model: nn.Module, group: Group, *, rehearses: bool, order: list[int]) -> nn.Module:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if rehearses:
        one_pass = partial(_backward, wrapped, 0, group.rank_info.rank)
        order[:] = warm_up_ddp(model, wrapped, (), group.device, one_pass, order=[*order])
    return wrapped


def _backward(model: Callable[[Tensor], Tensor], step: int, rank: int) -> None:
    inputs = torch.randn(16, 31, generator=torch.Generator().manual_seed(7919 * step + rank))
    model(inputs).square().mean().backward()


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.long)])
def test_with_a_rehearsal_a_restart_changes_no_bit(world_size: int, tmp_path: Path) -> None:
    unbroken = in_group(world_size, partial(_train, restarts=False, rehearses=True), tmp_path / "unbroken")
    restarted = in_group(world_size, partial(_train, restarts=True, rehearses=True), tmp_path / "restarted")

    assert all(torch.equal(one, other) for one, other in zip(unbroken[0], restarted[0], strict=True))


@pytest.mark.long
def test_without_a_rehearsal_a_restart_does_change_bits(tmp_path: Path) -> None:
    """The guard of the test above: were DDP to add in the same order anyway, the rehearsal could go."""
    unbroken = in_group(4, partial(_train, restarts=False, rehearses=False), tmp_path / "unbroken")
    restarted = in_group(4, partial(_train, restarts=True, rehearses=False), tmp_path / "restarted")

    assert not all(torch.equal(one, other) for one, other in zip(unbroken[0], restarted[0], strict=True))


@pytest.mark.long
@pytest.mark.parametrize("keeps", [True, False])
def test_an_order_of_gradients_drawn_at_random_is_kept_for_the_next_attempt(tmp_path: Path, *, keeps: bool) -> None:
    walk = partial(_train, rehearses=True, make=Shuffled, keeps=keeps)
    unbroken = in_group(3, partial(walk, restarts=False), tmp_path / "unbroken")
    restarted = in_group(3, partial(walk, restarts=True), tmp_path / "restarted")

    assert all(torch.equal(one, other) for one, other in zip(unbroken[0], restarted[0], strict=True)) == keeps


def test_a_kept_order_of_another_model_is_not_used() -> None:
    model = Net()

    found = warm_up_ddp(model, model, (), torch.device("cpu"), partial(_backward, model, 0, 0), order=[1, 0])

    assert sorted(found) == [*range(len([*model.parameters()]))]


def test_a_rehearsal_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = Net()
    before = [value.clone() for value in model.state_dict().values()]
    generator = torch.get_rng_state()

    warm_up_ddp(model, model, (), torch.device("cpu"), partial(_backward, model, 0, 0))

    assert all(torch.equal(one, other) for one, other in zip(before, model.state_dict().values(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in model.parameters())


class Replaces(nn.Linear):
    """Puts another tensor in the place of its buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__(31, 2)
        self.register_buffer("mean", torch.zeros(31))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = self.mean + inputs.mean(dim=0)
        return super().forward(inputs - self.mean)


def test_a_rehearsal_leaves_no_trace_in_a_buffer_that_forward_replaces() -> None:
    model = Replaces()
    buffer = model.mean

    warm_up_ddp(model, model, (), torch.device("cpu"), partial(_backward, model, 0, 0))

    assert model.mean is buffer
    assert not buffer.any()


class OfTheUser:
    """A batch type of the user's own, as graphs and ragged sequences have."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.names = ["a", "b"]

    def to(self, device: torch.device) -> OfTheUser:
        raise AssertionError(f"a copy needs no {device}")


def test_a_copy_of_a_batch_shares_nothing_with_it_and_as_much_within_itself() -> None:
    values = torch.arange(6.0)
    batch = {"nest": (values, [values[:3]]), "own": OfTheUser(values), "ids": [1, 2]}

    copy: Any = copy_batch(batch)
    copy["nest"][0].mul_(2)
    copy["ids"].append(3)
    copy["own"].names.clear()
    del copy["nest"]

    assert batch.keys() == {"nest", "own", "ids"}
    assert values.tolist() == [0, 1, 2, 3, 4, 5]
    assert (batch["ids"], batch["own"].names) == ([1, 2], ["a", "b"])  # type: ignore[attr-defined]  # an OfTheUser
    assert copy["own"].values.tolist() == [0, 2, 4, 6, 8, 10]


def test_a_batch_that_cannot_be_copied_is_used_itself_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    batch = [(number for number in range(3))]

    assert copy_batch(batch) is batch
    assert "cannot be copied (TypeError: cannot pickle 'generator' object)" in caplog.text


class WithLoss(nn.Linear):
    """Has a parameter that the loss alone uses."""

    def __init__(self) -> None:
        super().__init__(31, 2)
        self.scale = nn.Parameter(torch.ones(()))


def _said_of_a_loss_with_weights(group: Group) -> str:
    model = WithLoss()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    try:
        (wrapped(torch.ones(4, 31)) * model.scale).sum().backward()
    except RuntimeError as error:
        return str(explain_unused(error, model))
    return ""


def test_a_weight_that_the_loss_alone_uses_is_named_where_unused_ones_are_looked_for(tmp_path: Path) -> None:
    said = in_group(2, _said_of_a_loss_with_weights, tmp_path)

    assert all("a gradient to `scale` twice. With `train.find_unused_parameters=true`" in one for one in said), said


class Idle(nn.Linear):
    """Has a parameter that forward does not use."""

    def __init__(self) -> None:
        super().__init__(31, 2)
        self.idle = nn.Parameter(torch.zeros(3))


def _said_of_idle(group: Group) -> str:
    model = Idle()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    try:
        for step in range(2):
            _backward(wrapped, step, group.rank_info.rank)
    except RuntimeError as error:
        return str(explain_unused(error, model))
    return ""


def test_a_parameter_without_a_gradient_is_named_with_the_key_that_helps(tmp_path: Path) -> None:
    said = in_group(2, _said_of_idle, tmp_path)

    assert all("no gradient to `idle`, and" in one and "`train.find_unused_parameters=true`" in one for one in said)
    assert explain_unused(RuntimeError("another"), Idle()) is None
