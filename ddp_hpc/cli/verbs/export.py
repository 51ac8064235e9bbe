"""Write the weights of a run's checkpoint to one safetensors file, with the names of the model's `state_dict()`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.cli.runs import add_run, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add_run(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--step", type=int, metavar="N", help="export the checkpoint of this step; default: the newest")
    parser.add_argument(
        "--ema", action="store_true", help="export the moving average of the weights, if `train.ema_decay` is set"
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Write the file."""
    from ddp_hpc.watch.checkpoints import choose_step, export

    run_dir = chosen_run(args, environment)
    step = choose_step(run_dir, args.step)
    num_tensors = export(run_dir, step, args.output, ema=args.ema)
    print(f"wrote {num_tensors} tensors of {run_dir.name}, step {step}, to {args.output}")
    return 0
