"""Each module keeps the mode that the recipe gave it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ddp_hpc.train.engine.modes import evaluation_mode, set_train_mode_once


def a_model() -> nn.Sequential:
    """Return a model that holds a batch norm in evaluation mode, and has one layer in two places."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.Dropout()), nn.BatchNorm1d(2), nn.Sequential(shared))
    model[1].eval()
    model[2].eval()  # and with it the shared layer
    return model


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def test_within_an_evaluation_all_modules_are_in_evaluation_mode_and_afterwards_in_their_own() -> None:
    model = a_model()
    before = modes(model)

    with evaluation_mode(model):
        within = modes(model)

    assert set(within.values()) == {False}
    assert modes(model) == before
    assert before == {"": True, "0": True, "0.0": False, "0.1": True, "1": False, "2": False}


def test_modes_come_back_when_an_evaluation_fails() -> None:
    model = a_model()
    before = modes(model)

    with pytest.raises(ZeroDivisionError), evaluation_mode(model):
        1 / 0  # noqa: B018

    assert modes(model) == before


def test_what_a_builder_holds_is_held_from_the_first_step() -> None:
    model = a_model()
    before = modes(model)

    set_train_mode_once(model)

    assert modes(model) == before


class FreezesItself(nn.Sequential):
    """Freezes its first layer when a loop calls `train`."""

    def train(self, mode: bool = True) -> FreezesItself:
        super().train(mode)
        self[0].eval()
        return self


def test_what_a_train_method_freezes_is_frozen_from_the_first_step() -> None:
    model = FreezesItself(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    outer = nn.Sequential(model, nn.Dropout())
    outer[1].eval()

    set_train_mode_once(outer)

    assert modes(outer) == {"": True, "0": True, "0.0": False, "0.1": True, "1": False}


def test_a_model_that_is_left_in_evaluation_mode_stays_so() -> None:
    model = nn.Sequential(nn.Dropout()).eval()

    set_train_mode_once(model)
    with evaluation_mode(model):
        torch.zeros(1)

    assert modes(model) == {"": False, "0": False}
