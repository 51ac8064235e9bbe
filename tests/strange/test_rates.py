"""Samples a second and the time left, as `status` and `metrics.jsonl` tell them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.base.durable import read_json_lines
from ddp_hpc.run.run_dir.records import read_progress
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.data.sample_order import Position, SampleOrder
from ddp_hpc.train.engine.training import Training
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.recording.run_recorder import RunRecorder
from tests.made_run import make_run
from tests.strange.one_process import trained
from tests.unit.made_state import alone


class Clock:
    """A clock that data drives."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Taking(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take so many seconds each, by that clock."""

    def __init__(self, clock: Clock, num_samples: int, seconds: float) -> None:
        self.clock, self.num_samples, self.seconds = clock, num_samples, seconds

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.clock.now += self.seconds
        return torch.ones(1), torch.ones(1)


def test_rates_are_those_of_the_training_however_long_an_evaluation_takes(tmp_path: Path) -> None:
    """A sample takes a quarter of a second, so that there are four a second; an evaluation takes a hundred."""
    clock = Clock()

    def set_clock(training: Training) -> None:
        training.recorder._clock = clock

    training = trained(
        tmp_path / "run",
        Recipe(
            model=nn.Linear(1, 1),
            train_data=Taking(clock, 12, 0.25),
            eval_data=Taking(clock, 10, 10.0),
            loss=nn.functional.mse_loss,
        ),
        change=set_clock,
    )

    lines = [line for line in read_json_lines(training.run.metrics) if line["kind"] == "train"]
    assert [line["samples_per_s"] for line in lines[1:]] == pytest.approx([4.0] * 11)
    newest = read_progress(training.run)
    assert newest is not None
    assert newest.samples_per_s == pytest.approx(4.0)
    assert newest.eta_s == 0.0


def test_the_time_left_counts_evaluations_and_saves(tmp_path: Path) -> None:
    """A step takes a second, and an evaluation after each a hundred more."""
    clock = Clock()
    order = SampleOrder(num_samples=40, seed=0, global_batch_size=4, micro_batch_size=4, world_size=1)
    run = make_run(tmp_path, "run")
    recorder = RunRecorder(run, RunSpec(name="run"), alone(), PhaseTimes(), attempt=0, total_steps=10, order=order)
    recorder._clock = clock
    recorder.open(Position())
    for step in range(1, 6):
        clock.now += 1.0
        recorder.record_progress(order.position_after(Position(), step), now=True)
        with recorder.exclude_from_rates():
            clock.now += 100.0
    recorder.close()

    newest = read_progress(run)
    assert newest is not None
    assert [newest.samples_per_s, newest.eta_s] == pytest.approx([4.0, 5 * 101.0])


class FasterSoon(Taking):
    """Its first samples take longer."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.seconds = 1.0 if self.clock.now < 8.0 else 0.05
        return super().__getitem__(index)


def test_a_rate_that_is_not_measured_again_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half a second of training is the least that a rate is measured over."""
    clock = Clock()

    def set_clock(training: Training) -> None:
        training.recorder._clock = clock

    caplog.set_level("INFO")
    data = FasterSoon(clock, 12, 1.0)
    training = trained(
        tmp_path / "run",
        Recipe(model=nn.Linear(1, 1), train_data=data, loss=nn.functional.mse_loss),
        change=set_clock,
    )

    lines = [line for line in read_json_lines(training.run.metrics) if line["kind"] == "train"]
    rates = [line["samples_per_s"] for line in lines]
    assert rates == [None, pytest.approx(1.0), *([None, None, pytest.approx(20.0)] * 3), None]
    told = [text for text in caplog.messages if text.startswith("step ")]
    assert ["samples/s" in text for text in told] == [rate is not None for rate in rates]
