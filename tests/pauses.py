"""Lets a test take the place of one module's pauses."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest


def in_pauses_of(module: str, do: Callable[[float], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `do` with the seconds in place of each `time.sleep` of one module.

    Not of `time` itself: a thread that an earlier test has left behind sleeps, too.
    """
    own = SimpleNamespace(**{name: getattr(time, name) for name in ("monotonic", "time")}, sleep=do)
    monkeypatch.setattr(f"{module}.time", own)
