"""What a script says of its own progress, for `status`; written every few seconds at most."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import write_script_report

WRITE_INTERVAL_S = 2.0


@dataclass(kw_only=True)
class ScriptReport:
    """Rank zero's report of a run."""

    run: RunDir
    attempt: int
    _said: dict[str, Any] = field(default_factory=dict)
    _samples: float = 0.0
    _written_at: float = float("-inf")
    _samples_since: float = field(default_factory=time.monotonic)
    _is_pending: bool = False
    _pid: int = field(default_factory=os.getpid)

    def take_values(self, values: Mapping[str, Any], *, samples: float | None = None, now: bool = False) -> None:
        """Take the newest values; write them if the last time is long enough ago, or `now`."""
        # A tensor is kept as it is: to read its value waits for the device, and most of them are never written.
        new = {**values, "metrics": {**self._said.get("metrics", {}), **values.get("metrics", {})}}
        self._said.update({key: _detached(value) for key, value in new.items() if value is not None})
        self._samples += samples or 0.0
        self._is_pending = True
        if now or time.monotonic() - self._written_at >= WRITE_INTERVAL_S:
            self.write()

    def write_last(self) -> None:
        """Write at the end of the process what is not written yet; a process that it has forked has nothing to say."""
        if self._is_pending and os.getpid() == self._pid:
            self.write()

    def write(self) -> None:
        self._is_pending = False
        at = time.monotonic()
        if self._samples and at > self._samples_since:
            self._said["samples_per_s"] = self._samples / (at - self._samples_since)
        self._samples, self._samples_since, self._written_at = 0.0, at, at
        record = {"attempt": self.attempt, **_as_numbers(self._said)}
        with suppress(OSError):  # the file system does not answer now; the next report says the same and more
            write_script_report(self.run, record)


def _detached(value: Any) -> Any:
    """Return a copy of a tensor without the graph that computed it, whose memory it would hold; CUDA graphs overwrite their outputs."""
    if isinstance(value, Mapping):
        return {key: _detached(one) for key, one in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _as_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_numbers(one) for key, one in value.items()}
    return value if type(value) is int else float(value)  # a truth value is 1 or 0
