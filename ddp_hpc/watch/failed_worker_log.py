"""Finds the log of a failed worker, and reads its last lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddp_hpc.base.durable import read_end_of_file
from ddp_hpc.base.patience import is_final_error
from ddp_hpc.run.run_dir.paths import RunDir

if TYPE_CHECKING:
    from ddp_hpc.run.run_dir.failure_reports import WorkerFailure

_TAIL_BYTES = 16 << 10
_NUM_QUOTED_LINES = 3
"""Lines of a console that are quoted."""


def log_of(run: RunDir, failure: WorkerFailure) -> Path | None:
    """Return the log of a failure if it still exists, also when the run directory has been moved."""
    path = Path(failure.log)
    moved = run.attempt_logs(0).parent / path.parent.name / path.name
    return next((candidate for candidate in (path, moved) if candidate.is_file()), None)


def last_words(run: RunDir, since: float = 0.0) -> str:
    """Return the end of a run's console, to quote where no record says more; empty where nothing was written there `since`."""
    try:
        lines = last_lines(run.console, _NUM_QUOTED_LINES) if run.console.stat().st_mtime >= since else []
    except OSError as error:
        return "" if is_final_error(error) else f"{run.console} cannot be read: {error.strerror}"
    return f"{run.console} ends with: {' | '.join(lines)}" if lines else ""


def last_lines(path: Path, count: int) -> list[str]:
    """Return the last lines of a log."""
    _, text = read_end_of_file(path, _TAIL_BYTES)
    return text.decode("utf-8", errors="replace").rstrip().splitlines()[-count:]
