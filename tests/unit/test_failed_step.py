"""A run that fails says at which step that was, also where the step before was written less than a second ago."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.run.run_dir.records import read_progress
from tests.made_run import make_run

RECIPE = """
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe

class Unfreezes(torch.optim.SGD):
    steps = 0

    def __init__(self, model, lr):
        super().__init__([model.bias], lr=lr)
        self.kept = model.weight

    def step(self, closure=None):
        Unfreezes.steps += 1
        if Unfreezes.steps == 3:
            self.add_param_group({"params": [self.kept]})
        super().step()

def build():
    rows = torch.ones(40, 1)
    data = TensorDataset(rows, rows)
    return Recipe(model=torch.nn.Linear(1, 1), train_data=data, loss=torch.nn.MSELoss(), optimizer=Unfreezes)
"""
MAIN = """
import os, sys
from ddp_hpc.train import worker
environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0",
           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
os._exit(worker.main(sys.argv[1], environ, attempt=0))
"""


@pytest.mark.long
def test_an_optimizer_that_adds_a_group_fails_after_the_step_that_it_reached(tmp_path: Path) -> None:
    (tmp_path / "unfreezing.py").write_text(RECIPE)
    run = make_run(tmp_path)
    run.config.write_text(
        "name: digits\nrecipe: {target: 'unfreezing:build'}\ntrain: {global_batch_size: 4, epochs: 2}\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", MAIN, str(run.path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        check=False,
    )

    assert done.returncode == exit_codes.REFUSED
    assert "had 1 parameter groups before the first step" in run.rank_log(0, 0).read_text()
    progress = read_progress(run)
    assert progress is not None
    assert (progress.step, progress.total_steps) == (3, 20)
