"""Records which samples each step used, as the loader delivered them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ddp_hpc.base.durable import make_directories, open_private
from ddp_hpc.train.data.sample_order import GlobalBatch, MicroBatch


class StepObserver(Protocol):
    """Sees the samples of each step of this rank; the loop calls it."""

    def note(self, plan: MicroBatch, delivered: Sequence[int]) -> None:
        """Take note of a micro batch after its backward; `delivered` are the ids of its samples, those of no weight last."""

    def record(self, plan: GlobalBatch) -> None:
        """Write what was noted in a step, before the optimizer changes the weights."""

    def close(self) -> None:
        """Close the file."""


class SampleRecorder:
    """Writes one line a step, `{"step": 7, "epoch": 1, "samples": [...]}`; steps and epochs are counted from one."""

    def __init__(self, path: Path) -> None:
        make_directories(path.parent)
        self._file = open_private(path, "ab", buffering=0)
        self._used: list[int] = []

    def note(self, plan: MicroBatch, delivered: Sequence[int]) -> None:
        self._used += delivered[: plan.num_real]

    def record(self, plan: GlobalBatch) -> None:
        line = {"step": plan.after.step, "epoch": plan.micro_batches[0].epoch + 1, "samples": self._used}
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._used = []

    def close(self) -> None:
        self._file.close()
