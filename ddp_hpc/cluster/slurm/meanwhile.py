"""Ask Slurm something while this process does something else: each of its commands takes several milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Meanwhile(Generic[T]):
    """A question that a thread asks, from now on."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._answer: Future[T] = Future()
        # Where this process is interrupted, it does not wait for the answer.
        threading.Thread(target=self._run, args=(ask,), daemon=True).start()

    def _run(self, ask: Callable[[], T]) -> None:
        try:
            self._answer.set_result(ask())
        except BaseException as error:  # noqa: BLE001  `answer` raises it
            self._answer.set_exception(error)

    def wait(self) -> None:
        """Wait until there is an answer, or an error."""
        self._answer.exception()

    def answer(self) -> T:
        """Wait for the answer; raise what asking has raised."""
        return self._answer.result()
