"""Records whose loss costs less than what would wait for them, on a disk that is full or gone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def best_effort() -> Iterator[None]:
    """Go on without a record that cannot be written: the way back into the queue matters more, and the next attempt makes up for it."""
    try:
        yield
    except OSError as error:
        sys.stderr.write(f"note: a record was not written: {error}\n")
