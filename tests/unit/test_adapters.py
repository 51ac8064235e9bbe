"""The callbacks of `train/adapters`, with stand-ins for the libraries, which the tests of `tests/adapters` have."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

Loads = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Loads:
    """Return what imports an adapter whose library is a stand-in."""

    def load(name: str) -> ModuleType:
        library = SimpleNamespace(
            TrainerCallback=object,
            Callback=object,
            ClusterEnvironment=object,
            LightningEnvironment=object,
            TorchElasticEnvironment=object,
        )
        for one in ("transformers", "lightning.fabric.plugins.environments", "lightning.pytorch.callbacks"):
            monkeypatch.setitem(sys.modules, one, library)
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return load


def test_the_trainer_stops_in_the_middle_of_an_epoch_with_one_save_and_no_evaluation(load: Loads) -> None:
    run = MagicMock()
    run.should_stop.side_effect = [False, True]
    callback = load("ddp_hpc.train.adapters.transformers").AgreedStop(run)
    state = SimpleNamespace(global_step=7)

    def asked(event: str, **before: bool) -> SimpleNamespace:
        """Return what the callback has the Trainer do, whose own callback for epochs or steps comes first."""
        control = SimpleNamespace(should_save=False, should_evaluate=False, should_training_stop=False, **before)
        control.should_save = control.should_evaluate = True
        getattr(callback, event)(None, state, control)
        return control

    goes_on, ends = [asked("on_step_end"), asked("on_epoch_end")], [asked("on_step_end"), asked("on_epoch_end")]

    assert [(one.should_save, one.should_evaluate) for one in goes_on] == [(True, True), (True, True)]
    assert [(one.should_save, one.should_evaluate) for one in ends] == [(True, False), (False, False)]
    assert [one.should_training_stop for one in (*goes_on, ends[0])] == [False, False, True]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([1, 1, 2, 2, 3, 4, 5, 6], [2, 4, 6]),  # gradients are accumulated
        ([2, 4, 6, 8, 10], [2, 4, 6, 8, 10]),
        ([3, 6, 9, 12], [3, 6, 9, 12]),
        ([5, 6, 8, 9, 11], [5, 6, 8, 11]),
    ],
)
def test_lightning_saves_where_the_steps_of_several_optimizers_pass_a_multiple(
    steps: list[int], expected: list[int], load: Loads, tmp_path: Path
) -> None:
    run: Any = MagicMock(checkpoint_dir=tmp_path)
    run.should_stop.return_value = False
    callback = load("ddp_hpc.train.adapters.lightning").AgreedStop(run, save_every=2)
    trainer = MagicMock()

    for number, trainer.global_step in enumerate(steps):
        callback.on_train_batch_end(trainer, None, None, None, number)

    assert [int(call.args[0].name[5:-4]) for call in run.commit.call_args_list] == expected
