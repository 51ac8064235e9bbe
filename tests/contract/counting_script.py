"""A user's script that is no training: rank zero saves a file for each number that it has counted to."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

UP_TO = 6
HELD_AT = 3
signals: list[int] = []


def note(number: int, _frame: FrameType | None) -> None:
    """Remember a signal."""
    signals.append(number)


def main(how: str) -> int:
    """Count on from the files that are there."""
    rank, saved = os.environ["RANK"], Path("saved")
    signal.signal(signal.SIGTERM, note)
    if how == "raises":
        raise ValueError("this number cannot be counted")
    saved.mkdir(exist_ok=True)
    Path(f"ready-{rank}").touch()
    while len(list(Path().glob("ready-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    while (count := len(list(saved.iterdir()))) < UP_TO:
        if signals:
            Path(f"stopped-{rank}").write_text(signal.Signals(signals[0]).name)
            return 99
        is_held = count == HELD_AT and not Path("go").exists()
        if rank == "0" and not is_held:
            (saved / str(count + 1)).touch()
        time.sleep(0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
