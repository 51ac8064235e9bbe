"""What a resumed training says where data, last step or schedule are not as they were."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_hpc.run.run_dir.failure_reports import make_failure
from ddp_hpc.run.spec import LrScheduleSpec
from ddp_hpc.train.engine.loop import restore, train
from ddp_hpc.train.recipe import Recipe
from tests.strange.walks import Case, begin, close
from tests.unit.made_state import alone


def recipe(num_samples: int = 16) -> Recipe:
    data = TensorDataset(torch.ones(num_samples, 3), torch.arange(num_samples) % 3)
    return Recipe(model=nn.Linear(3, 3), train_data=data, loss=nn.CrossEntropyLoss())


def case(num_samples: int = 16, **keys: int) -> Case:
    return Case(recipe=partial(recipe, num_samples), train={"epochs": 2, "global_batch_size": 4, **keys}, save_every=1)


def trained(case: Case, path: Path, *, attempt: int, schedule: str = "constant") -> None:
    t = begin(case, alone(), path, attempt=attempt)
    t.spec = replace(t.spec, lr_schedule=LrScheduleSpec(name=schedule))  # type: ignore[arg-type]  # one of its names
    train(t)
    close(t)


@pytest.mark.parametrize(
    ("stops_at", "now", "said"),
    [
        (3, 32, "32 samples, and 16 when step 3 was saved. Epoch 1 had begun"),
        (4, 32, "32 samples, and 16 when step 4 was saved. You need do nothing"),
        (3, 12, "12 samples, and 16 when step 3 was saved. "),
        (3, 16, ""),
    ],
)
def test_data_that_has_another_size_than_the_checkpoint_saw_is_told_of(
    stops_at: int, now: int, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(case(max_steps=stops_at), tmp_path / "run", attempt=0)
    caplog.clear()

    trained(case(now), tmp_path / "run", attempt=1)

    assert (
        ("the size of the data has changed: " + said in caplog.text) if said else "size of the data" not in caplog.text
    )


def test_the_new_size_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(case(max_steps=3), tmp_path / "run", attempt=0)
    trained(case(32, max_steps=5), tmp_path / "run", attempt=1)
    caplog.clear()

    trained(case(32), tmp_path / "run", attempt=2)

    assert "the size of the data has changed" not in caplog.text


@pytest.mark.parametrize(("schedule", "tells"), [("cosine", True), ("constant", False)])
def test_a_schedule_that_more_epochs_stretch_is_told_of_with_the_way_to_keep_the_rate(
    schedule: str, tells: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(case(), tmp_path / "run", attempt=0, schedule=schedule)
    caplog.clear()

    trained(case(epochs=4), tmp_path / "run", attempt=1, schedule=schedule)

    assert ("ends at step 16 instead of 8" in caplog.text) == tells
    assert ("`lr_schedule.name=constant train.lr=0.0019`" in caplog.text) == tells


@pytest.mark.parametrize(("max_steps", "tells"), [(8, False), (9, True)])
def test_more_steps_than_the_epochs_have_are_told_of(
    max_steps: int, tells: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    t = begin(case(max_steps=max_steps), alone(), tmp_path / "run")
    restore(t)
    close(t)

    assert ("`train.max_steps` is 9, but `train.epochs=2` ends the training at step 8" in caplog.text) == tells


class SilentError(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no str")


def test_an_exception_that_cannot_say_its_message_is_reported_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(SilentError) as caught:
        raise SilentError

    found = make_failure(caught.value, rank=0, log=tmp_path / "log")

    assert found.exception == "SilentError: <exception str() failed>"
    assert found.place.startswith("test_plan_changes.py in ")
