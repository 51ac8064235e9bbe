"""Records that may be lost on a full or unmounted disk, because requeueing the job matters more."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def best_effort() -> Iterator[None]:
    """Go on without a record that cannot be written: the job can be requeued, and the next attempt trained, without it."""
    try:
        yield
    except OSError as error:
        sys.stderr.write(
            f"note: ddp-hpc could not write one of its records and continues without it: {error}. The training is not affected.\n"
        )
