"""Look into the image of a run: does its Python have what the workers import?

ddp-hpc container check run.yaml container.image=/scratch/torch.sif

It starts the image as a run would, with the same binds and variables, imports what workers do, and says what is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.cli.runs import add_site
from ddp_hpc.cli.verbs.submit import sort_words
from ddp_hpc.cli.words import as_json, table
from ddp_hpc.exit_codes import FAILED, FINISHED

if TYPE_CHECKING:
    from ddp_hpc.submission.image_check import Found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("action", choices=("check",), help="check: say what is missing; exit 1 where a run would fail")
    parser.add_argument("config", metavar="CONFIG", help="the configuration file")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="values that win over all others")
    add_site(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Look, and say what is there."""
    from ddp_hpc.config import resolve
    from ddp_hpc.submission.image_check import check_image

    path, settings = sort_words([args.config, *args.settings])
    spec = resolve(path, settings, environment, site=args.site).spec
    found = check_image(spec, work_dir=Path.cwd(), environ=environment)
    print(as_json(asdict(found)) if args.json else _as_text(found))
    return FAILED if found.problems else FINISHED


def _as_text(found: Found) -> str:
    built = [f"{name} {value}" for name, value in found.torch.items() if value not in {None, False}]
    rows = [
        ("image", f"{found.image}, by {found.runtime}"),
        *([("python", f"{found.python} on {found.machine}")] if found.python else []),
        *found.modules.items(),
        *([("built with", ", ".join(built))] if built else []),
        *(("note", note) for note in found.notes),
        *(("MISSING", problem) for problem in found.problems),
    ]
    verdict = "a run would fail: build an image on top of it that has what is missing" if found.problems else "good"
    return "\n".join([table(("", ""), rows).lstrip("\n"), verdict])
