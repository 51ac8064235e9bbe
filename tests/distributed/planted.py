"""Two runs that differ in one line, what `ddp-hpc bisect` has to say of them, and what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_hpc.train.data.sample_order import permutation
from tests.distributed import planted_recipe

SOURCE = Path(planted_recipe.__file__)
NUM_STEPS = 80
BATCH = 8
CONFIG = f"""
recipe: {{target: "planted_recipe:build"}}
train: {{max_steps: {NUM_STEPS}, global_batch_size: {BATCH}, lr: 0.01, record_samples: true}}
optimizer: {{name: adamw}}
lr_schedule: {{name: step, milestones: [40], gamma: 0.5}}
log: {{every_steps: 10}}
integrity: {{every_steps: 8}}
checkpoint: {{every_steps: 20, keep_last: 2}}
"""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """One difference between two runs, and where it shows first."""

    name: str
    step: int
    first: tuple[str, str]
    """Kind and name of whatever differs first."""
    tensor: tuple[str, str] | None = None
    """Kind and name of the first tensor; None: the same as `first`."""
    line: tuple[str, str] | None = None
    """The line's old and new text."""
    settings: tuple[str, ...] = ()
    """Keys that the second run has otherwise."""
    row: int | None = None
    """The row of the data file that is changed."""
    ranks: int = 1
    rank: int = 0
    samples: list[int] = field(default_factory=list)
    """The samples whose content differs."""


def step_of(sample: int) -> int:
    """Return the first step that uses a sample."""
    return _place_of(sample) // BATCH + 1


def rank_of(sample: int, ranks: int) -> int:
    """Return the rank that gets a sample in the first epoch."""
    return _place_of(sample) % BATCH % ranks


def _place_of(sample: int) -> int:
    """Return a sample's place in the first epoch."""
    return permutation(planted_recipe.NUM_SAMPLES, 0, 0).tolist().index(sample)


WEIGHT, LR = ("weight", "first.weight"), ("option", "group 0, lr")
PLANTED = [
    Planted(name="lr at step 24", settings=("lr_schedule.milestones=[23,40]",), step=24, first=LR, tensor=WEIGHT),
    Planted(name="scheduler off by one", settings=("lr_schedule.milestones=[41]",), step=41, first=LR, tensor=WEIGHT),
    Planted(
        name="init of one weight",
        line=("nn.init.zeros_(self.third.bias)", "nn.init.constant_(self.third.bias, 1e-6)"),
        step=0,
        first=("weight", "third.bias"),
    ),
    Planted(
        name="label of one sample",
        line=("RELABELLED = -1", "RELABELLED = 57"),
        step=step_of(57),
        first=("batch", "targets"),
        samples=[57],
    ),
    Planted(
        name="dropped normalisation",
        line=("nn.LayerNorm(16, elementwise_affine=False)", "nn.Identity()"),
        step=1,
        first=("output", "norm"),
    ),
    Planted(
        name="weight decay of one group",
        settings=("optimizer.weight_decay=0.001",),
        step=1,
        first=("option", "group 0, weight_decay"),
        tensor=WEIGHT,
    ),
    Planted(name="augmentation", line=("0.1 * torch.randn", "0.11 * torch.randn"), step=1, first=("batch", "inputs")),
    Planted(name="seed", settings=("seed=1",), step=0, first=WEIGHT),
    Planted(
        name="order of data",
        line=("self._rows[index]", "self._rows[NUM_SAMPLES - 1 - index]"),
        step=1,
        first=("batch", "inputs"),
    ),
    Planted(name="activation", line=("nn.ReLU()", "nn.ELU()"), step=1, first=("output", "relu")),
    Planted(
        name="eps",
        settings=("optimizer.eps=1e-7",),
        step=1,
        first=("option", "group 0, eps"),
        tensor=WEIGHT,
    ),
    Planted(
        name="betas",
        settings=("optimizer.betas=[0.9,0.99]",),
        step=1,
        first=("option", "group 0, betas"),
        tensor=("moment", "first.weight/exp_avg_sq"),
    ),
    Planted(
        name="gradient clipping",
        settings=("train.grad_clip_norm=0.01",),
        step=1,
        first=("used gradient", "first.weight"),
    ),
    Planted(
        name="loss scaling",
        line=("loss=loss)", "loss=lambda outputs, targets: 1.001 * loss(outputs, targets))"),
        step=1,
        first=("loss", "loss"),
    ),
    Planted(
        name="accumulation",
        settings=("train.micro_batch_size=4",),
        step=1,
        first=("samples", "micro batch 0"),
        tensor=("batch", "inputs"),
    ),
    Planted(
        name="cast in one layer",
        line=("self.second(hidden)", "self.second(hidden.bfloat16().float())"),
        step=1,
        first=("output", "second"),
    ),
    Planted(name="bit flip", line=("FLIP_AT = -1", "FLIP_AT = 37"), step=37, first=("gradient", "third.weight")),
    Planted(name="changed file", row=101, step=step_of(101), first=("batch", "inputs"), samples=[101]),
    Planted(
        name="label smoothing",
        line=("nn.CrossEntropyLoss()", "nn.CrossEntropyLoss(label_smoothing=0.01)"),
        step=1,
        first=("loss", "loss"),
    ),
    Planted(
        name="frozen bias",
        line=("bias.requires_grad_(True)", "bias.requires_grad_(False)"),
        step=1,
        first=("gradient", "second.bias"),
    ),
    Planted(
        name="label of one sample, 2 ranks",
        line=("RELABELLED = -1", "RELABELLED = 12"),
        step=step_of(12),
        first=("batch", "targets"),
        ranks=2,
        rank=rank_of(12, 2),
        samples=[12],
    ),
    Planted(
        name="bit flip on rank 1 of 2",
        line=(
            'FLIP_AT = -1\n"""The step in which one bit of a gradient is flipped."""\nFLIP_ON = "0"',
            'FLIP_AT = 53\nFLIP_ON = "1"',
        ),
        step=53,
        first=("gradient", "third.weight"),
        ranks=2,
        rank=1,
    ),
]


def make_code(folder: Path, planted: Planted | None = None) -> Path:
    """Write the recipe and its data, with a difference if asked; return the configuration beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    text = SOURCE.read_text()
    if planted and planted.line:
        assert text.count(planted.line[0]) == 1, planted.line
        text = text.replace(*planted.line)
    (folder / "planted_recipe.py").write_text(text)
    rows = torch.randn(planted_recipe.NUM_SAMPLES, 12, generator=torch.Generator().manual_seed(5)).numpy()
    if planted and planted.row is not None:
        rows[planted.row, 3] += 0.5
    np.save(folder / "rows.npy", rows)
    (folder / "planted.yaml").write_text(CONFIG)
    return folder / "planted.yaml"


def command(*words: str, cwd: Path, code: int | None = 0) -> str:
    """Run ddp-hpc; return what it printed."""
    argv = [sys.executable, "-m", "ddp_hpc", *words]
    done = subprocess.run(argv, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert code is None or done.returncode == code, (done.returncode, done.stdout + done.stderr)
    return done.stdout


def train(folder: Path, name: str, planted: Planted | None, *, ranks: int) -> Path:
    """Train with the code in `folder`; return the run's directory."""
    config = make_code(folder, planted)
    settings = planted.settings if planted else ()
    runs = folder.parent / "runs"
    words = [str(config), f"name={name}", f"runs_dir={runs}", f"resources.workers_per_node={ranks}", "--wait"]
    command("submit", *words, *settings, cwd=folder)
    return runs / name


def bisected(one: Path, other: Path) -> Mapping[str, Any]:
    """Bisect two runs; return the answer."""
    answer: Mapping[str, Any] = json.loads(command("bisect", str(one), str(other), "--json", cwd=one, code=None))
    return answer


def is_right(planted: Planted, answer: Mapping[str, Any]) -> bool:
    """Return whether step, value, tensor, rank and samples are named exactly."""
    parting = answer["parting"]
    if parting is None:
        return False
    first, tensor = parting["first"], parting["tensor"]
    return (
        (first["step"], first["rank"]) == (planted.step, planted.rank)
        and (first["kind"], first["name"]) == planted.first
        and tensor["step"] == planted.step
        and (tensor["kind"], tensor["name"]) == (planted.tensor or planted.first)
        and (first["samples"] == planted.samples or not planted.samples)
    )
