"""Reports which ranks have not joined, from rank zero, while all wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

FIRST_LOOK_S = 25.0
"""How long rank zero waits before it looks: nodes rarely start in the same second."""
LOOK_S = 10.0

Report = Callable[[Sequence[int]], object]


def announce(store: dist.Store, rank: int) -> None:
    """Say that this rank has reached the store."""
    store.set(_key(rank), "")


@contextmanager
def missing_reported(
    connect: Callable[[], dist.Store], world_size: int, report: Report, *, first_look_s: float = FIRST_LOOK_S
) -> Iterator[None]:
    """While the `with` block takes long, report which ranks have not reached the store: none where all have, and still wait.

    `connect` opens another connection: a request that waits blocks all others on its own.
    """
    is_over = threading.Event()

    def look() -> None:
        if is_over.wait(first_look_s):
            return
        try:
            store = connect()
            before: list[int] | None = None
            while not is_over.is_set():
                missing = [rank for rank in range(world_size) if not store.check([_key(rank)])]
                if missing != before:
                    report(missing)
                before = missing
                is_over.wait(LOOK_S)
        except (RuntimeError, OSError):  # the store is gone, or the disk is full: joining itself says what is wrong
            return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(LOOK_S)


def _key(rank: int) -> str:
    return f"here/{rank}"
