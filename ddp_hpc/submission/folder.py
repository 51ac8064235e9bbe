"""The run directory as `submit` makes it, whichever cluster the run goes to, and what came of a submission."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Literal

from ddp_hpc.durable import fsync_path, replace_text
from ddp_hpc.errors import ConfigError
from ddp_hpc.records import is_done
from ddp_hpc.run_dir import RunDir
from ddp_hpc.spec import RunSpec


@dataclass(frozen=True)
class Submission:
    """What came of a submission."""

    run: RunDir
    state: Literal["started", "queued", "finished", "running", "waiting"]
    """Started now; queued now; or before: finished, running, waiting in the queue."""
    attempt: int
    is_new: bool = False
    """Whether the run did not exist before."""
    job_id: str | None = None
    notes: tuple[str, ...] = ()
    """What the user should know about it."""


def is_finished(run: RunDir, spec: RunSpec) -> bool:
    """Tell whether nothing is left to do; more epochs or steps than before are more to do."""
    return is_done(run, epochs=spec.train.epochs, max_steps=spec.train.max_steps)


def make_run_dir(run: RunDir, resolved_text: str, *, is_new: bool) -> None:
    """Make the run's directory by one rename, or renew its configuration."""
    try:
        if not is_new:
            run.done.unlink(missing_ok=True)
            replace_text(run.config, resolved_text)
            return
        run.path.parent.mkdir(parents=True, exist_ok=True)
        beside = RunDir(run.path.with_name(f".{run.name}.{os.getpid()}.tmp"))
        beside.path.mkdir(mode=0o700)
        try:
            replace_text(beside.config, resolved_text)
            beside.console.parent.mkdir()
            beside.path.rename(run.path)
        except OSError:
            shutil.rmtree(beside.path, ignore_errors=True)
            raise
        fsync_path(run.path.parent)
    except OSError as error:
        raise ConfigError(
            f"The run's directory {run.path} cannot be written: {error.strerror or error}. "
            "Choose another place with `runs_dir=...`, or free this one."
        ) from error
