"""What a checkpoint holds, and how it is put back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.train.state.training_state import TrainingState, non_tensor_state, tensors
from tests.unit.made_state import make_state, put_back, take_step

Saved = tuple[dict[str, Tensor], dict[str, Any]]


def saved(*states: TrainingState) -> Saved:
    """Return what a checkpoint of all ranks holds, copied, its numbers through JSON."""
    named = [item for state in states for item in tensors(state) if item.owner in (None, state.rank)]
    return {item.name: item.tensor.clone() for item in named}, json.loads(json.dumps(non_tensor_state(states[0])))


def are_equal(first: Saved, second: Saved) -> bool:
    return (
        first[1] == second[1]
        and first[0].keys() == second[0].keys()
        and all(torch.equal(first[0][name], second[0][name]) for name in first[0])
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_restored_training_goes_on_as_the_unbroken_one(optimizer: str, ema: bool, steps: int) -> None:
    unbroken = make_state(steps=steps, optimizer=optimizer, ema=ema)
    kept = saved(unbroken)
    for _ in range(2):
        take_step(unbroken)
    expected = saved(unbroken)

    resumed = make_state(optimizer=optimizer, ema=ema)
    put_back(resumed, *kept)
    is_back = are_equal(saved(resumed), kept)
    for _ in range(2):
        take_step(resumed)

    assert is_back
    assert are_equal(saved(resumed), expected)


def test_an_average_that_an_older_version_has_begun_goes_on_with_its_decay() -> None:
    """A checkpoint of an older version does not say that the decay warms up; to continue from it gives the bits that it gave then."""
    older = make_state(ema=True)
    older.ema.warms_up = False
    take_step(older)
    kept = saved(older)
    take_step(older)

    resumed = make_state(ema=True)
    put_back(resumed, *kept)
    take_step(resumed)

    assert "ema_warms_up" not in kept[1]
    assert are_equal(saved(resumed), saved(older))
    assert not are_equal(saved(resumed), saved(make_state(steps=2, ema=True)))


def test_names_say_what_a_tensor_is_and_who_writes_it() -> None:
    state = make_state(rank=1, world_size=2, steps=1, ema=True)

    owners = {item.name: item.owner for item in tensors(state)}

    assert owners["model/linear.weight"] is None
    assert owners["model/norm.running_mean"] == 0
    assert owners["ema/linear.weight"] is None
    assert owners["optimizer/linear.weight/exp_avg"] is None
    assert owners["rank.1/loss_meter"] == 1
    assert {"rank.1/rng.torch", "rank.1/rng.python", "rank.1/rng.numpy"} <= owners.keys()


def test_options_of_the_optimizer_are_those_of_the_configuration_and_not_the_checkpoints() -> None:
    kept = saved(make_state(steps=1))
    changed = make_state()
    changed.optimizer.param_groups[0]["lr"] = 0.5

    put_back(changed, *kept)

    assert changed.optimizer.param_groups[0]["lr"] == 0.5


def test_an_average_that_is_new_begins_with_the_weights() -> None:
    kept = saved(make_state(steps=2))
    state = make_state(ema=True)

    put_back(state, *kept)

    assert torch.equal(state.ema.module.linear.weight, kept[0]["model/linear.weight"])


def test_in_another_world_each_rank_is_seeded_by_seed_step_and_rank() -> None:
    states = [make_state(rank=rank, world_size=2, steps=2) for rank in range(2)]
    kept = saved(*states)

    drawn = []
    for rank in (0, 1, 2, 0):
        put_back(make_state(rank=rank, world_size=3), *kept)
        drawn.append(torch.rand(()).item())

    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_loss_since_the_last_log_line_is_kept_in_every_world(world_size: int) -> None:
    before = [make_state(rank=rank, world_size=2) for rank in range(2)]
    for rank, state in enumerate(before):
        state.loss_meter.fill_(1.0 + rank)
    kept = saved(*before)
    after = [make_state(rank=rank, world_size=world_size) for rank in range(world_size)]

    for state in after:
        put_back(state, *kept)

    assert sum(state.loss_meter.item() for state in after) == 3.0


def test_a_loss_scale_is_kept() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))  # makes its tensors
    kept = saved(make_state(scaler=scaler))
    state = make_state(scaler=torch.amp.GradScaler("cpu"))

    put_back(state, *kept)

    assert state.scaler.get_scale() == 8.0


class Stepper(torch.optim.SGD):
    """An optimizer that keeps something in its state."""

    def __init__(self, model: nn.Module, kept: object) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.state[next(model.parameters())] = {"kept": kept}


@pytest.mark.parametrize("kept", [3, 0.1, "text", None, True])
def test_numbers_and_text_in_an_optimizers_state_are_kept(kept: object) -> None:
    state, resumed = make_state(steps=0), make_state()
    state.optimizer = Stepper(state.model, kept)
    resumed.optimizer = Stepper(resumed.model, "to be replaced")

    put_back(resumed, *saved(state))

    assert resumed.optimizer.state[next(resumed.model.parameters())] == {"kept": kept}


def test_what_is_neither_tensor_nor_number_nor_text_is_refused() -> None:
    state = make_state()
    state.optimizer = Stepper(state.model, object())

    with pytest.raises(ConfigError, match="of type object, which no checkpoint would hold"):
        non_tensor_state(state)


def test_a_checkpoint_that_holds_more_of_an_optimizer_than_is_kept_now_is_refused() -> None:
    found, plain = saved(make_state())
    plain["optimizer"]["odd"] = {"inner": {}}

    with pytest.raises(ConfigError, match="optimizer has state that this version of ddp_hpc cannot load"):
        put_back(make_state(), found, plain)


def test_a_model_state_that_is_no_tensor_is_refused() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Mapping[str, int]:
            return {"colour": 3}

    state = make_state()
    state.model = Odd(2, 2)

    with pytest.raises(ConfigError, match="'_extra_state' of type dict"):
        tensors(state)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    kept = saved(make_state())
    state = make_state()
    state.model.linear = nn.Linear(3, 5)

    with pytest.raises(ConfigError, match=r"(?s)of another model.*linear\.weight.*give the run a new `name`"):
        put_back(state, *kept)


def test_a_checkpoint_whose_optimizer_trains_more_is_refused() -> None:
    named, plain = saved(make_state(steps=1))
    named["optimizer/decoder.weight/exp_avg"] = torch.zeros(2)

    with pytest.raises(ConfigError, match=r"'decoder\.weight', which this model does not have"):
        put_back(make_state(), named, plain)


def test_a_checkpoint_of_another_optimizer_is_refused() -> None:
    named, plain = saved(make_state(steps=1))

    with pytest.raises(ConfigError, match=r"optimizer is Other, but this run's is"):
        put_back(make_state(), named, {**plain, "optimizer": {**plain["optimizer"], "type": "Other"}})


def test_a_checkpoint_of_another_model_is_told_in_one_line_with_a_few_names_and_a_way_on() -> None:
    """Thirteen weights differ; five are named."""
    own = {f"layer.{index:02}": torch.zeros(1) for index in range(13)}
    other = nn.Module()
    for index in range(13):
        other.register_buffer(f"other_{index:02}", torch.zeros(1))
    state = make_state()
    state.model = other

    with pytest.raises(ConfigError) as refused:
        put_back(state, {f"model/{name}": one for name, one in own.items()}, non_tensor_state(make_state()))

    told = str(refused.value)
    assert "\n" not in told
    assert "unknown: layer.00, layer.01, layer.02, layer.03, layer.04 and 8 more." in told
    assert "`ddp-hpc submit --fresh`" in told
