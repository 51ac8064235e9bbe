"""A run that is submitted again after it has diverged names the rank in which the NaN arises (`debug.nan`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_hpc.cluster.rendezvous.worker_env import launched_worker_env, nan_check_variables, ranks_by_shape
from ddp_hpc.job.supervisor import why_check_nan
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ledger
from tests.distributed.whole_runs import Workplace
from tests.made_run import made_attempt

RECIPE = """
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe

class Rows(TensorDataset):
    def __getitem__(self, index):
        row, target = super().__getitem__(index)
        if torch.distributed.get_rank() == 1:
            row = row * float("nan")
        return row, target

def build():
    rows = torch.randn(400, 4)
    return Recipe(model=torch.nn.Linear(4, 2), train_data=Rows(rows, rows[:, :2].argmax(1)), loss=torch.nn.CrossEntropyLoss())
"""
CONFIG = """
recipe: {target: "nan_recipe:build"}
resources: {workers_per_node: 2}
train: {epochs: 1, global_batch_size: 4}
"""
RANKS = ranks_by_shape(node_rank=0, num_nodes=1, num_workers=2, local_rank=0)
DIVERGED = made_attempt(3, cause=Cause.DIVERGED)
CRASHED = made_attempt(3, cause=Cause.WORKER_CRASHED)


@pytest.mark.long
def test_the_rank_with_the_nan_is_named_when_the_run_is_submitted_again(tmp_path: Path) -> None:
    (tmp_path / "nan_recipe.py").write_text(RECIPE)
    workplace = Workplace(tmp_path)
    workplace.config.write_text(CONFIG)

    reasons = []
    for _ in range(2):
        workplace.submit("run", "--wait")
        newest = Ledger.read(workplace.run("run")).newest
        assert newest is not None
        assert newest.cause == "diverged"
        reasons.append(newest.reason)

    assert "the loss is not finite since step 1" in reasons[0]
    assert "what rank 1 had computed itself has a NaN, in step 1" in reasons[1]
    why = json.loads(workplace.command("why", "run", "--json").stdout)
    assert (why["failure"], why["rank"]) == ("nan", 1)


@pytest.mark.parametrize(
    ("asked", "newest", "ends_at_nan", "is_on"),
    [
        ("auto", None, True, False),
        ("auto", CRASHED, True, False),
        ("auto", DIVERGED, True, True),
        ("auto", DIVERGED, False, False),
        ("never", DIVERGED, True, False),
        ("always", None, False, True),
    ],
)
def test_the_check_is_on_where_a_nan_has_ended_the_run(
    asked: str,
    newest: Attempt | None,
    ends_at_nan: bool,
    is_on: bool,
) -> None:
    assert bool(why_check_nan(asked, newest, ends_at_nan=ends_at_nan)) == is_on  # type: ignore[arg-type]


def test_workers_get_the_variables_of_the_check_with_its_reason_and_users_win() -> None:
    given = launched_worker_env("an agent", RANKS, {**nan_check_variables("so"), "TORCH_NCCL_NAN_CHECK": "0"}).variables

    assert (given["TORCH_DIST_NAN_CHECK"].value, given["TORCH_DIST_NAN_CHECK"].rule) == ("1", "so")
    assert given["TORCH_NCCL_NAN_CHECK"].value == "0"
    assert "TORCH_DIST_NAN_CHECK" not in launched_worker_env("an agent", RANKS, {}).variables
