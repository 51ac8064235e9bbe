"""Start a command in less time: run the garbage collector seldom.

Nearly all the time of a short command is its imports (`make bench ARGS=commands`). Two rules keep it short:

- `cli/` imports a verb when it is asked for, and a verb imports at its top what it always needs. What one option, one back
  end or a file needs is imported there, marked "late".
- `tests/architecture/test_torch_free.py` lists what `--help`, `list`, `status` and a dry run must not load.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collect_garbage_seldom() -> Iterator[None]:
    """Search for garbage seldom, and not at the end: for a process that runs one command in the `with` block, and then ends."""
    # Modules, functions and classes are no garbage. By default, Python searches for some whenever 700 more objects exist,
    # and once more at its end: a tenth of a short command.
    gc.set_threshold(20_000, 10, 10)
    try:
        yield
    finally:
        gc.freeze()
