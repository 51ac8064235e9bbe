"""Start a command in less time: load some modules at their first use only, and run the garbage collector seldom.

Nearly all the time of a short command is its imports (`make bench ARGS=commands`). Three rules keep it short:

- A module of others that commands import, but seldom use, stands in `AT_FIRST_USE`.
- `cli/` imports a verb when it is asked for, and a verb imports at its top what it always needs. What one option, one back
  end or a file needs is imported there, marked "late".
- `tests/architecture/test_torch_free.py` lists what `--help`, `list`, `status` and a dry run must not load.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from typing import Any

AT_FIRST_USE = frozenset(
    {
        "bz2",
        "csv",
        "ctypes",
        "inspect",
        "ipaddress",
        "logging",
        "lzma",
        "platform",
        "psutil",
        "socket",
        "subprocess",
        "tempfile",
    }
)
"""Modules that a command loads when it first uses them. Two have only one importer, which hardly needs them: `dataclasses`
(up to Python 3.11) imports `inspect`, and `urllib.parse` imports `ipaddress`."""


class _LazyFinder:
    """Finds the modules of `AT_FIRST_USE` as `PathFinder` does, with a loader that runs them at their first use."""

    # Python loads such a module also when a second module imports it. So this helps as long as one module imports it, of
    # those that a command loads (https://docs.python.org/3/library/importlib.html#importlib.util.LazyLoader).

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in AT_FIRST_USE else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


@contextmanager
def quick_start() -> Iterator[None]:
    """Start quickly, and end quickly: for a process that runs one command in the `with` block, and then ends."""
    # Modules, functions and classes are no garbage. By default, Python searches for some whenever 700 more objects exist,
    # and once more at its end: a tenth of a short command.
    gc.set_threshold(20_000, 10, 10)
    sys.meta_path.insert(0, _LazyFinder)
    try:
        yield
    finally:
        gc.freeze()
