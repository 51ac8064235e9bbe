"""Write a small example that runs as it is: `my_recipe.py` (model, data, loss) and `my_run.yaml` (configuration)."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.base.errors import ConfigError

RECIPE = '''\
"""A first recipe: which of three arms of a spiral does a point lie on?"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_hpc import Recipe


def build(width: int = 64) -> Recipe:
    """Return what is trained: `recipe.target` in my_run.yaml names this function, `recipe.args` its arguments."""
    return Recipe(
        model=nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)),
        train_data=points(3000, seed=0),  # anything with len(data) and data[index]
        eval_data=points(600, seed=1),  # held out; may be left out
        loss=nn.CrossEntropyLoss(),  # (outputs, targets) -> the mean over the samples
        metrics={"accuracy": accuracy},  # (outputs, targets) -> one value a sample
    )
    # No DistributedDataParallel, sampler, device, loop or checkpoint here: ddp_hpc brings them.


def points(count: int, *, seed: int) -> TensorDataset:
    """Draw points of the three arms; put your own data here."""
    generator = torch.Generator().manual_seed(seed)
    arms = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator)
    angle = 4 * radius + arms * 2.0944 + 0.1 * torch.randn(count, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arms)


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return 1 for each sample whose likeliest class is the right one, else 0."""
    return (outputs.argmax(dim=1) == targets).float()
'''

CONFIG = """\
# A first run. Every key: `ddp-hpc config --all`. Any key may stand on the command line too: `train.lr=0.05`.

recipe:
  target: my_recipe:build     # module:function; my_recipe.py lies beside this file
  args:
    width: 64                 # any argument of `build`

train:
  epochs: 20
  global_batch_size: 60       # samples of one optimizer step, over all workers
  lr: 0.1                     # the peak; `lr_schedule` says how it goes
  # precision: bf16           # on GPUs

resources:
  workers_per_node: 2         # two processes on CPUs; on GPUs write `gpus_per_node: 4` instead
  # nodes: 2                  # on Slurm
  # time_limit_min: 60        # on Slurm, of each job; a run may need several, and ddp-hpc resumes it

checkpoint:
  every_steps: 100            # also at the end, and after a stop signal

# slurm:                      # `ddp-hpc site init` keeps what holds for all runs on a cluster
#   partition: gpu
#   account: abc123
"""

FILES = {"my_recipe.py": RECIPE, "my_run.yaml": CONFIG}
"""Name -> text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir",
        metavar="DIR",
        nargs="?",
        type=Path,
        default=Path(),
        help="the directory to write to; default: the current one",
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:  # noqa: ARG001  # every verb's signature
    """Write both, or neither where one is there already."""
    paths = {args.dir / name: text for name, text in FILES.items()}
    there = [str(path) for path in paths if os.path.lexists(path)]
    if there:
        raise ConfigError(
            f"{' and '.join(there)} exists already, and `ddp-hpc init` overwrites nothing. Name another directory: `ddp-hpc init DIR`."
        )
    try:
        args.dir.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(
            f"The directory {args.dir} cannot be written: {error.strerror}. Name another one: `ddp-hpc init DIR`."
        ) from error
    where = "" if args.dir == Path() else f"cd {shlex.quote(str(args.dir))} && "
    print("\n".join([*(f"wrote   {path}" for path in paths), f"start   {where}ddp-hpc submit my_run.yaml --follow"]))
    return 0
