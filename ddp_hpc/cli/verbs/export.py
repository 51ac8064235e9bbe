"""Write a run's weights to one safetensors file, by the model's own names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.cli.runs import add_run, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--step", type=int, metavar="N", help="of the checkpoint of this step; default: the newest")
    parser.add_argument("--ema", action="store_true", help="their moving average, where `train.ema_decay` kept one")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Write the file."""
    from ddp_hpc.watch.checkpoints import choose_step, export

    run_dir = chosen_run(args, environment)
    step = choose_step(run_dir, args.step)
    num_tensors = export(run_dir, step, args.output, ema=args.ema)
    print(f"{args.output}: {num_tensors} tensors of {run_dir.name}, step {step}")
    return 0
