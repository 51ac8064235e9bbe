"""Ask Slurm something while this process does something else: each of its commands takes several milliseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Meanwhile(Generic[T]):
    """A question that a thread asks, from now on."""

    def __init__(self, ask: Callable[[], T]) -> None:
        self._ask = ask
        self._answers: list[T] = []
        self._error: BaseException | None = None
        # Where this process is interrupted, it does not wait for the answer.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._ask())
        except BaseException as error:  # noqa: BLE001  `answer` raises it
            self._error = error

    def wait(self) -> None:
        """Wait until there is an answer, or an error."""
        self._thread.join()

    def answer(self) -> T:
        """Wait for the answer; raise what asking has raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._answers[0]
