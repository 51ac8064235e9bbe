"""What one rank of a run prints, as it comes: rank zero, or the one that says where the training is."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddp_hpc.prove.certify.output_lines import PrintedLine, parse, scale_of


@dataclass
class LiveOutput:
    """The lines of one attempt."""

    log: Path
    began: float
    """When the run began, by the monotonic clock."""
    lines: list[PrintedLine] = field(default_factory=list)
    _num_bytes: int = 0
    _unfinished: str = ""
    """The part of a line that stands at the end of the log."""
    _last_epoch: float | None = None

    def read(self) -> bool:
        """Read what is new; return whether there was anything."""
        with suppress(OSError):
            if self.log.stat().st_size == self._num_bytes:
                return False
            with self.log.open("rb") as file:
                file.seek(self._num_bytes)
                data = file.read()
            self._num_bytes += len(data)
            text = self._unfinished + data.decode("utf-8", errors="replace")
            *whole, self._unfinished = text.replace("\r", "\n").split("\n")  # progress bars write over their line
            at = time.monotonic() - self.began
            for line in filter(str.strip, whole):
                self.lines.append(parse(line, at, self._last_epoch))
                self._last_epoch = self._last_epoch if self.lines[-1].epoch is None else self.lines[-1].epoch
            return True
        return False

    def has_position(self) -> bool:
        """Tell whether a line has said where the training is: the script has resumed by then."""
        return bool(scale_of(self.lines).unit)

    def step_s(self) -> float:
        """Return how long a step takes, and half a step more, as the newest lines show."""
        newest = self.lines[-5:]
        if len(newest) < 2:
            return 0.05
        return min(0.5, max(0.02, 1.5 * (newest[-1].at - newest[0].at) / (len(newest) - 1)))
