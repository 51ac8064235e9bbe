"""Write the weights of a run's checkpoint to one safetensors file, with the names of the model's `state_dict()`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.cli.runs import add_run_argument, chosen_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--step", type=int, metavar="N", help="export the checkpoint of this step; default: the newest")
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="export the moving average of the weights (`train.ema_decay`), or the weights themselves; default: the average if there is one, since it was evaluated",
    )


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.watch.checkpoints import choose_step, export

    run_dir = chosen_run(args, environment)
    step = choose_step(run_dir, args.step)
    num_tensors, is_average = export(run_dir, step, args.output, ema=args.ema)
    which = "the moving average, which was evaluated; `--no-ema` exports the weights themselves"
    told = f" ({which})" if is_average else " (not their moving average)" if args.ema is False else ""
    print(f"wrote {num_tensors} tensors of {run_dir.name}, step {step}, to {args.output}{told}")
    return 0
