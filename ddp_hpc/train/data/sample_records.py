"""Records which samples each step used, as the loader delivered them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from ddp_hpc.base.durable import make_directories, open_private
from ddp_hpc.train.data.sample_order import GlobalBatch, MicroBatch


class SampleRecorder:
    """Writes one line a step, `{"step": 7, "epoch": 1, "samples": [...]}`; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        self.is_on = path is not None
        """Whether the loop has to note and record."""
        self._file: IO[bytes] | None = None
        self._used: list[int] = []
        if path is not None:
            make_directories(path.parent)
            self._file = open_private(path, "ab", buffering=0)

    def note(self, plan: MicroBatch, delivered: Sequence[int]) -> None:
        """Keep the samples of a micro batch that have weight."""
        if self._file is not None:
            self._used += delivered[: plan.num_real]

    def record(self, plan: GlobalBatch) -> None:
        """Write the samples of one step; steps and epochs are counted from one."""
        if self._file is not None:
            line = {"step": plan.after.step, "epoch": plan.micro_batches[0].epoch + 1, "samples": self._used}
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._used = []

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
