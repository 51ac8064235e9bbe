"""What an attempt that a newer one has replaced does to the run's records when it wakes up, and what a commit waits for."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_hpc.base.errors import FencedError
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress, read_progress, write_progress
from ddp_hpc.run.spec import RunSpec
from ddp_hpc.train.data.sample_order import Position, SampleOrder
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.recording.run_recorder import RunRecorder
from tests.distributed.test_disk_full import no_room_beyond
from tests.made_run import add_attempt, make_run
from tests.strange.walks import Case, begin, close
from tests.unit.made_state import alone

ORDER = SampleOrder(num_samples=8, seed=0, global_batch_size=1, micro_batch_size=1, world_size=1)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def small_recipe() -> Recipe:
    data = TensorDataset(torch.arange(24.0).reshape(8, 3), torch.arange(8) % 3)
    return Recipe(model=nn.Linear(3, 3), train_data=data, loss=nn.CrossEntropyLoss())


def recorder(run: RunDir, attempt: int) -> RunRecorder:
    return RunRecorder(run, RunSpec(name="digits"), alone(), PhaseTimes(), attempt=attempt, total_steps=8, order=ORDER)


def logged(run: RunDir) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def begun(run: RunDir, attempt: int, step: int, *steps: int) -> RunRecorder:
    """Return the records of an attempt that has taken these steps since `step`."""
    ownership.claim_run(run, attempt)
    records = recorder(run, attempt)
    records.open(Position(step=step))
    for number in steps:
        records.record_training(Position(step=number), loss=1.0, lr=0.1)
    return records


def test_who_wakes_up_as_he_opens_the_metrics_leaves_them_to_the_newer_attempt(run: RunDir) -> None:
    begun(run, 0, 0, 1, 2).close()
    ownership.claim_run(run, 1)
    woken = recorder(run, 1)
    newest = begun(run, 2, 2, 3, 4)

    woken.open(Position(step=1))
    woken.record_training(Position(step=2), loss=2.0, lr=0.1)
    woken.record_progress(Position(step=2), now=True)
    newest.record_progress(Position(step=4), now=True)
    woken.close()
    newest.close()

    assert logged(run) == [1, 2, 3, 4]
    assert not run.superseded_metrics.exists()
    progress = read_progress(run)
    assert progress is not None
    assert (progress.attempt, progress.step) == (2, 4)


@pytest.mark.parametrize("resumed_at", [1, 2])
def test_who_wakes_up_amid_his_training_writes_into_no_file_of_the_newer_attempt(run: RunDir, resumed_at: int) -> None:
    woken = begun(run, 0, 0, 1, 2)
    newest = begun(run, 1, resumed_at, *range(resumed_at + 1, 5))

    woken.record_training(Position(step=3), loss=2.0, lr=0.1)
    woken.record_progress(Position(step=3), now=True)
    newest.record_training(Position(step=5), loss=1.0, lr=0.1)
    woken.close()
    newest.close()

    assert logged(run) == [1, 2, 3, 4, 5]
    progress = read_progress(run)
    assert progress is not None
    assert progress.attempt == 1


def test_the_claim_of_a_finished_run_is_gone_and_an_older_attempt_still_changes_nothing(run: RunDir) -> None:
    add_attempt(run, 1)
    begun(run, 1, 0, 1).close()
    ownership.release_claim(run, 1)

    with pytest.raises(FencedError, match="A newer attempt"):
        write_progress(run, Progress(attempt=0, step=7))

    assert logged(run) == [1]


def elsewhere(*_: object, by_way_of: Path | None = None, **_more: object) -> None:
    """Do as a rename does between two file systems."""
    if by_way_of is not None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def test_a_claim_that_was_deleted_by_hand_does_not_stop_the_records(run: RunDir) -> None:
    records = begun(run, 0, 0, 1)
    ownership.release_claim(run, 0)

    records.record_progress(Position(step=2), now=True)

    records.close()
    progress = read_progress(run)
    assert progress is not None
    assert progress.step == 2


def test_a_claim_on_another_file_system_still_keeps_fenced_attempts_away(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    ownership.claim_run(run, 0)
    monkeypatch.setattr(ownership, "replace_text", elsewhere)
    write_progress(run, Progress(attempt=0, step=1))  # raises nothing
    ownership.claim_run(run, 1)

    with pytest.raises(FencedError):
        write_progress(run, Progress(attempt=0, step=2))


def test_what_waits_is_written_before_the_manifest(run: RunDir) -> None:
    records = begun(run, 0, 0, 1)
    with no_room_beyond(0):
        records.record_training(Position(step=2), loss=1.0, lr=0.1)
        with pytest.raises(OSError, match="File too large"):
            records.flush()
    before = logged(run)

    records.flush()
    records.close()

    assert before == [1]
    assert logged(run) == [1, 2]


def test_no_step_is_committed_whose_line_is_not_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = begin(Case(recipe=small_recipe, log_every=1, save_every=1), alone(), tmp_path / "run")

    def refuse() -> None:
        raise OSError("the disk takes no line")

    monkeypatch.setattr(t.checkpointer, "before_commit", refuse)
    with pytest.raises(Exception, match="the disk takes no line"):
        train(t)
    close(t)

    assert not [*t.run.checkpoints.glob("step-*")]
