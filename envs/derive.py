"""Write what follows from pyproject.toml and constraints.txt: requirements.txt, constraints-cpu.txt, environment.yml.

python envs/derive.py [DIR]        # Python 3.11 or newer; DIR: where to, instead of here
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVS = Path(__file__).parent
HEADER = "# {told}; made by envs/derive.py, do not edit.\n"
TESTED_PYTHON = "3.11"
GPU_ONLY = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton\b)")
"""Beginnings of packages that PyTorch's builds for CUDA bring along, and others do not."""


def requirements(project: dict[str, Any]) -> str:
    """Return what ddp_hpc needs, and torchvision for its recipe, with the oldest versions that it believes in."""
    lines = [*project["dependencies"], *project["optional-dependencies"]["vision"]]
    return HEADER.format(told="What ddp_hpc[vision] needs, from pyproject.toml") + "".join(
        f"{line}\n" for line in lines
    )


def constraints_cpu(constraints: str) -> str:
    """Return the pins without what only builds for GPUs bring."""
    lines = [line for line in constraints.splitlines() if not line.startswith("#") and not GPU_ONLY.match(line)]
    told = "The pins of constraints.txt for PyTorch's builds for CPUs, from the index that it keeps for these"
    return HEADER.format(told=told) + "".join(f"{line}\n" for line in lines)


def environment() -> str:
    """Return an environment for conda, mamba or micromamba, which pip fills by the same pins."""
    told = "The tested environment for conda; create it from the project's root"
    return HEADER.format(told=told) + (
        "name: ddp_hpc\n"
        "channels: [conda-forge]\n"
        "dependencies:\n"
        f"  - python={TESTED_PYTHON}\n"
        "  - pip\n"
        "  - pip:\n"
        "      - -c constraints.txt\n"
        "      - -r requirements.txt\n"
    )


def main(argv: Sequence[str]) -> None:
    """Write the three."""
    import tomllib  # type: ignore[import-not-found,unused-ignore]  # Python 3.11's

    folder = Path(argv[0]) if argv else ENVS
    project = tomllib.loads((ENVS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    made = {
        "requirements.txt": requirements(project),
        "constraints-cpu.txt": constraints_cpu((ENVS / "constraints.txt").read_text(encoding="utf-8")),
        "environment.yml": environment(),
    }
    for name, text in made.items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
