"""A training whose numbers are all exact in binary, so that its digests are the same on every processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_hpc.run.checkpoints.checkpoint_names import checkpoint_path
from ddp_hpc.run.checkpoints.checkpoint_store import checkpoint_digest
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.engine.loop import train
from ddp_hpc.train.process_group import Group
from ddp_hpc.train.recipe import Recipe
from tests.strange.walks import Case, begin, everything

NUM_SAMPLES, WIDTH = 16, 6
SAVED, LAST = 3, 8
"""The step whose checkpoint is kept, and the last one."""


class Exact(nn.Module):
    """Multiplies by weights, and adds what this rank's generators draw."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(WIDTH, dtype=torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.count += 1
        noise = torch.randint(0, 2, inputs.shape) if self.training else 0
        return (self.weight * (inputs + noise)).sum(1)


def build() -> Recipe:
    rows = (torch.arange(NUM_SAMPLES * WIDTH) % 3 - 1).float().view(NUM_SAMPLES, WIDTH)
    return Recipe(
        model=Exact(),
        train_data=TensorDataset(rows, torch.zeros(NUM_SAMPLES)),
        loss=lambda outputs, targets: (outputs - targets).mean(),
        optimizer=lambda model, _: torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
    )


CASE = Case(recipe=build, train={"epochs": 2, "ema_decay": 0.5, "lr": 0.5})


def finish(group: Group, path: Path, *, attempt: int = 0) -> dict[str, Any]:
    """Train to the last step, from the newest checkpoint in `path`; return digests of all checkpoints, and all losses."""
    training = begin(CASE, group, path, attempt=attempt)
    assert train(training)
    everything(training)
    run = RunDir(path)
    lines = run.metrics.read_text().splitlines() if group.rank_info.is_rank_zero else []
    return {"digest": checkpoint_digest(checkpoint_path(run, LAST)), "metrics": lines}
