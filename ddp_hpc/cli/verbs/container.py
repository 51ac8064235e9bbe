"""Build a container image for runs, or check that an image has what a run needs.

ddp-hpc container build torch.sif                           build an image with PyTorch and all that workers import
ddp-hpc container build torch.sif --base pytorch/pytorch    add what is missing to another image, and keep its PyTorch
ddp-hpc container check run.yaml container.image=torch.sif  check that workers can import all they need in the image

`check` starts the image as a run does, with the same mounts and variables, and imports what workers import.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.exit_codes import FAILED, FINISHED
from ddp_hpc.cli.formatting import as_json, table
from ddp_hpc.cli.runs import add_flag, add_site_option
from ddp_hpc.cli.verbs.submit import split_config_words

if TYPE_CHECKING:
    from ddp_hpc.watch.diagnose.image_probe import ImageFindings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("build", "check"), help="build an image, or check one")
    parser.add_argument("what", metavar="IMAGE|CONFIG", help="the image; with `check`, a run's configuration file")
    parser.add_argument(
        "settings", metavar="KEY=VALUE", nargs="*", help="check: set a key; it overrides the file's value"
    )
    parser.add_argument("--base", metavar="IMAGE", help="build: the image to start from, in a registry or a file")
    parser.add_argument(
        "--engine",
        choices=("auto", "apptainer", "singularity", "docker"),
        default="auto",
        help="build: the program that builds",
    )
    parser.add_argument(
        "--build-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="build: set a build argument of the container recipe (`docker build --build-arg`)",
    )
    add_flag(parser, "--force", "build: overwrite an existing file")
    add_site_option(parser)
    add_flag(parser, "--json", "check: print JSON instead of text")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if args.settings and args.action != "check":
        raise ConfigError(
            f"`ddp-hpc container {args.action}` takes one image, but {args.settings[0]!r} follows it. Remove that."
        )
    return {"build": _build, "check": _check}[args.action](args, environment)


def _build(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.launch.submission.image_build import build_image

    build_image(
        args.what, base=args.base, engine=args.engine, build_args=args.build_arg, force=args.force, environ=environment
    )
    print(f"built {args.what}. Use it: ddp-hpc submit run.yaml container.image={args.what}")
    return FINISHED


def _check(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    from ddp_hpc.run.config.resolve import resolve
    from ddp_hpc.watch.diagnose.image_probe import check_image

    path, settings = split_config_words([args.what, *args.settings])
    spec = resolve(path, settings, environment, site=args.site).spec
    found = check_image(spec, work_dir=Path.cwd(), environ=environment)
    print(as_json(asdict(found)) if args.json else _as_text(found))
    return FAILED if found.problems else FINISHED


def _as_text(found: ImageFindings) -> str:
    built = [f"{name} {value}" for name, value in found.torch.items() if value not in {None, False}]
    rows = [
        ("image", f"{found.image}, by {found.runtime}"),
        *([("python", f"{found.python} on {found.machine}")] if found.python else []),
        *found.modules.items(),
        *([("built with", ", ".join(built))] if built else []),
        *(("note", note) for note in found.notes),
        *(("PROBLEM", problem) for problem in found.problems),
    ]
    verdict = (
        "a run in this image would fail. Add missing modules: ddp-hpc container build NEW.sif --base IMAGE. If Python did not "
        "start, correct `container.image`, `container.python` or `container.options`."
    )
    return "\n".join(
        [table(("", ""), rows).lstrip("\n"), verdict if found.problems else "good: the image has all that a run needs"]
    )
