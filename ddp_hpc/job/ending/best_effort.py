"""Records and diagnoses that an attempt's end can go without, because requeueing the job matters more."""

from __future__ import annotations

import sys
import traceback
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


@contextmanager
def best_effort_diagnosis(of: str) -> Iterator[None]:
    """Go on without an answer to what is wrong, whatever keeps it from being found: the end is then decided by what is known."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  nothing that only explains a failure may add one
        traceback.print_exception(error)
        sys.stderr.write(
            f"note: ddp-hpc could not examine {of} and continues without it: {type(error).__name__}: {error}. The training is not affected.\n"
        )
