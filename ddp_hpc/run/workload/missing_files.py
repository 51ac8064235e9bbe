"""Files and directories that are missing on this host: which ones a recipe names, and why a job may find them all the same."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.spec import LaunchSpec

NODE_LOCAL_DIRS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # noqa: S108  # named to be refused
"""Directories that each node has for itself."""
_CHANGE_DIR_PATTERN = re.compile(r"(?:^|[\s;&])(?:cd|pushd)\s")


def refuse_missing(error: ConfigError, named: str, spec: LaunchSpec) -> str:
    """Refuse a file that is missing here; return why not, where the job may find it."""
    if why := _why_job_may_find(Path(named), spec):
        return f"{why}: {error}"
    raise error


def missing_path_problems(args: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the job may fail of a recipe's argument that names a place on this host: nothing or no file is there."""
    for name, value in args.items():
        path = Path(value if isinstance(value, str) else "")
        first = path.parts[0] if len(path.parts) > 1 else ""  # `org/model` is no path, unless there is such a directory
        if first and (first in {"~", ".."} or os.path.exists(first)) and not os.path.exists(path):  # noqa: PTH110  for any text
            yield f"`recipe.args.{name}` is {str(path)!r}, and this host has no such file or directory. Correct it, unless nodes have one"
        elif value and os.path.isdir(path) and not os.listdir(path):  # noqa: PTH112, PTH208  the same
            yield f"`recipe.args.{name}` is {str(path)!r}, and this host has no file in that directory. Correct it, unless nodes have one"


def _why_job_may_find(path: Path, spec: LaunchSpec) -> str:
    """Return why the job may find a file that this host lacks; empty where it cannot."""
    if spec.slurm.dependency:
        return "a job that this one waits for (`slurm.dependency`) may make it"
    if any(map(_CHANGE_DIR_PATTERN.search, spec.slurm.setup)):
        return "`slurm.setup` changes the directory"
    if not path.is_absolute():
        return ""
    inside = {"container.image": spec.container.image, "stage.archive": spec.stage.archive}
    if key := next((key for key, value in inside.items() if value), ""):
        return f"`{key}` may have it"
    if place := next((place for place in NODE_LOCAL_DIRS if path.is_relative_to(place)), ""):
        return f"each node has a {place} of its own"
    top = Path(*path.parts[:2])
    return "" if top.exists() else f"this host has no {top}, and nodes may have it"
