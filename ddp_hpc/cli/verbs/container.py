"""Build the image of a run, look into it, or tell it from others.

ddp-hpc container build torch.sif                           an image with all that workers import
ddp-hpc container build torch.sif --base pytorch/pytorch    the same on top of another, whose PyTorch it keeps
ddp-hpc container check run.yaml container.image=torch.sif  has its Python what the workers import?
ddp-hpc container digest torch.sif                          SHA-256, and what a run's ledger calls it

`check` starts the image as a run would, with the same binds and variables, and imports what workers do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.cli.formatting import as_json, or_dash, size, table
from ddp_hpc.cli.runs import add_site
from ddp_hpc.cli.verbs.submit import sort_words
from ddp_hpc.errors import ConfigError
from ddp_hpc.exit_codes import FAILED, FINISHED

if TYPE_CHECKING:
    from ddp_hpc.diagnose.image_probe import Found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("build", "check", "digest"), help="what to do")
    parser.add_argument("what", metavar="IMAGE|CONFIG", help="the image; of `check`, the configuration file")
    parser.add_argument("settings", metavar="KEY=VALUE", nargs="*", help="check: values that win over all others")
    parser.add_argument("--base", metavar="IMAGE", help="build: what to build on, of a registry or a file here")
    parser.add_argument(
        "--engine", choices=("auto", "apptainer", "singularity", "docker"), default="auto", help="build: with what"
    )
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="build: one more argument of the recipe"
    )
    parser.add_argument("--force", action="store_true", help="build: replace a file that is there")
    add_site(parser)
    parser.add_argument("--json", action="store_true", help="check, digest: print one JSON object")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Do what was asked."""
    if args.settings and args.action != "check":
        raise ConfigError(f"`container {args.action}` takes one image, and {args.settings[0]!r} is more.")
    return {"build": _build, "check": _check, "digest": _digest}[args.action](args, environment)


def _build(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.submission.image_build import build

    build(
        args.what,
        base=args.base,
        engine=args.engine,
        build_args=args.build_arg,
        force=args.force,
        environ=environment,
    )
    print(f"{args.what} is built. Use it: ddp-hpc submit run.yaml container.image={args.what}")
    return FINISHED


def _digest(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.submission.image_build import digest

    found = digest(args.what, environment)
    if args.json:
        print(as_json(asdict(found)))
    else:
        rows = [
            ("image", found.image),
            ("sha256", found.sha256),
            ("in ledgers", or_dash(found.identity)),
            ("size", size(found.num_bytes)),
        ]
        print(table(("", ""), rows).lstrip("\n"))
    return FINISHED


def _check(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.config import resolve
    from ddp_hpc.diagnose.image_probe import check_image

    path, settings = sort_words([args.what, *args.settings])
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
    verdict = "a run would fail: `ddp-hpc container build --base` puts what is missing on top of an image"
    return "\n".join([table(("", ""), rows).lstrip("\n"), verdict if found.problems else "good"])
