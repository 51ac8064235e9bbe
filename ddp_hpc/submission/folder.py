"""The run directory as `submit` makes it, whichever cluster the run goes to, and what came of a submission."""

from __future__ import annotations

import os
import shutil
import stat
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


def refuse_file_in_the_way(run: RunDir) -> None:
    """Refuse a run's directory that is a file, or would lie below one.

    Raises:
        ConfigError: where it does.
    """
    for place in (run.path, *run.path.parents):
        try:
            mode = place.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue  # the next one above says more
        except OSError:
            return  # whoever goes there says why that fails
        if not stat.S_ISDIR(mode):
            raise ConfigError(
                f"`runs_dir` and `name` put the run at {run.path}, but {place} is a file, not a directory. "
                "Choose another place with `runs_dir=...`."
            )
        return


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
