"""The command lines of campaigns: what they are for, and the folder that they work in."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Sequence
from pathlib import Path

from tests.campaigns.deaths.table import Death


def parser_of(module: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of `python -m MODULE`, whose help is the module's docstring."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def folder_to_fill(text: str) -> Path:
    """Return the folder of a campaign, which need not exist yet; it is the type of an argument."""
    path = Path(text).absolute()
    there = next(each for each in (path, *path.parents) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is not a directory. Give a folder that exists, or that can be made.")
    return path


def folder_that_exists(text: str) -> Path:
    """Return a folder that an earlier campaign has made; it is the type of an argument."""
    path = folder_to_fill(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path}. Give one that an earlier campaign has filled.")
    return path


def asked_deaths(
    module: str, text: str | None, deaths: Sequence[Death], argv: Sequence[str] | None
) -> tuple[Path, list[Death]]:
    """Return the folder that deaths are to be made in, and those whose names fit the pattern that was given."""
    parser = parser_of(module, text)
    parser.add_argument("folder", metavar="FOLDER", type=folder_to_fill, help="where the deaths are made and kept")
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", default="*", help="only those whose names fit, such as 'hang*'"
    )
    asked = parser.parse_args(argv)
    chosen = [death for death in deaths if fnmatch.fnmatch(death.name, asked.pattern)]
    if not chosen:
        parser.error(
            f"no death's name fits {asked.pattern!r}. The names are {', '.join(death.name for death in deaths)}."
        )
    return asked.folder.resolve(), chosen
