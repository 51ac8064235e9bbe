"""Code of the user's own beside the run's: entries of PYTHONPATH, and packages that are installed editable."""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddp_hpc.cluster.containers import PACKAGE_DIR


def live_folders(environ: Mapping[str, str]) -> list[Path]:
    """Return the directories that workers also import from, and whose code this user may edit while the job waits."""
    installed = [Path(sys.prefix), Path(sys.base_prefix), Path(site.getusersitepackages()), PACKAGE_DIR.parent]
    found = (Path(path).resolve() for path in [*environ.get("PYTHONPATH", "").split(os.pathsep), *_editable()] if path)
    return [
        path
        for path in dict.fromkeys(found)
        if path.is_dir() and os.access(path, os.W_OK) and not any(path.is_relative_to(one) for one in installed)
    ]


def _editable() -> Iterator[str]:
    """Yield where packages lie that are installed editable: by a `.pth` file, or by a finder of setuptools."""
    yield from sys.path[1:]  # the first is the program's own
    for name, module in sys.modules.copy().items():
        if name.startswith("__editable__"):
            yield from (os.path.dirname(path) for path in getattr(module, "MAPPING", {}).values())  # noqa: PTH120  text
