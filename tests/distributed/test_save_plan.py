"""Ranks whose steps take different times save after the same steps, which rank zero chooses from what it measures."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.checkpoint_store import checkpoint_digest
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import read_marks
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from ddp_hpc.train.state import rng
from tests.distributed import exact_training
from tests.distributed.processes import in_group
from tests.strange.walks import begin, close

LAST = 160
OFTEN = {"keep_last": 1000, "min_interval_s": 1, "max_interval_s": 2}


def uneven() -> Recipe:
    """Return a recipe whose steps take 20 ms on rank zero, and up to 40 ms on the others: they wait for the slowest."""
    recipe, rank = exact_training.build(), dist.get_rank() if dist.is_initialized() else 0

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        time.sleep(0.02 + 0.01 * rank)
        return (outputs - targets).mean()

    return replace(recipe, loss=loss)


AUTO = replace(
    exact_training.CASE,
    recipe=uneven,
    train={**exact_training.CASE.train, "epochs": 40, "max_steps": LAST},
    save_every="auto",
    checkpoint=OFTEN,
)


def trained(group: Group, path: Path, *, case: Any) -> None:
    training = begin(case, group, path, attempt=1)
    rng.seed_everything("rank", 0, 0, group.rank_info.rank)  # all generators are part of a checkpoint
    assert train(training)
    close(training)


@pytest.mark.long
def test_uneven_ranks_save_after_the_same_steps_and_end_with_the_same_bits(tmp_path: Path) -> None:
    runs = {"auto": RunDir(tmp_path / "auto"), "fixed": RunDir(tmp_path / "fixed")}
    fixed = replace(AUTO, save_every=1000)

    in_group(2, partial(trained, path=runs["auto"].path, case=AUTO), tmp_path / "ranks")
    in_group(2, partial(trained, path=runs["fixed"].path, case=fixed), tmp_path / "other-ranks")

    steps = committed_steps(runs["auto"])  # a checkpoint is committed only once each rank has written its part of it
    assert len(steps) >= 2, steps
    assert [mark.step for mark in read_marks(runs["auto"]) if mark.kind == "save"] == list(steps)
    assert committed_steps(runs["fixed"]) == [LAST]
    assert len({checkpoint_digest(checkpoint_path(run, LAST)) for run in runs.values()}) == 1
