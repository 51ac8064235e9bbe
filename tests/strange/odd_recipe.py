"""A recipe of unusual parts: batches of mappings, outputs of several kinds, a layer called twice, one that is never used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_hpc.train.recipe import Recipe


class Words(Dataset[Any]):
    """Mappings with a text, which no tensor holds."""

    def __init__(self, path: str | None) -> None:
        if path is not None:
            Path(path).read_text()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": torch.tensor([index % 7, index % 5]), "label": index % 2, "name": f"sample {index}"}


class Net(nn.Module):
    """Returns a mapping with tensors, None and text."""

    def __init__(self, *, is_random: bool, sizes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.twice = nn.Linear(6, 6)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Sequential(*(nn.Linear(6, 6) for _ in range(sizes)), nn.Linear(6, 2))
        self._is_random = is_random

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        hidden = self.embed(batch["words"]).mean(1)
        hidden = self.twice(self.twice(hidden).relu())
        if self._is_random:  # numbers that no generator of the state gives
            hidden = hidden + 1e-3 * os.urandom(1)[0]
        return {"logits": self.head(hidden), "nothing": None, "pair": (hidden, "text")}


def build(*, is_random: bool = False, path: str | None = None, sizes: int = 0, says: str | None = None) -> Recipe:
    """Return the recipe."""
    if says is not None:
        Path(says).write_text(str(os.environ.get("DDP_HPC_REPLAY")))
    loss = nn.CrossEntropyLoss()
    return Recipe(
        model=Net(is_random=is_random, sizes=sizes),
        train_data=Words(path),
        loss=lambda outputs, targets: loss(outputs["logits"], targets),
        inputs_and_targets=lambda batch: ({"words": batch["words"]}, batch["label"]),
    )
