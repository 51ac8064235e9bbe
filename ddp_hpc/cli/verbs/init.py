"""Write a small example that runs as it is: `my_recipe.py` (model, data, loss) and `my_run.yaml` (configuration)."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.first_files import FILES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
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
