"""Says at the end of a run's last attempt how busy its machines were."""

from __future__ import annotations

import sys
from contextlib import suppress

from ddp_hpc.run.run_dir.machine_use import recent_uses, summary_of
from ddp_hpc.run.run_dir.machine_words import sentence
from ddp_hpc.run.run_dir.paths import RunDir


def note_machine_use(run: RunDir, attempt: int) -> None:
    """Print it into the log, where something was measured."""
    with suppress(OSError):  # it is for readers only
        summary = summary_of(recent_uses(run, attempt))
        if summary is not None:
            sys.stderr.write(f"note: machine use of the attempt, on average (memory: at most): {sentence(summary)}\n")
