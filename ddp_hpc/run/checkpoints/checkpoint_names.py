"""The names of a run's checkpoints, and which of them are committed; `checkpoint_store` reads what they hold.

It is a module of its own because `status` and `list` need only the names, not the libraries that verify a checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path

from ddp_hpc.base.durable import numbers_in_names
from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import is_there
from ddp_hpc.run.run_dir.paths import RunDir

MANIFEST_NAME = "manifest.json"
COMMITTED_PATTERN = re.compile(r"step-(\d{8,})")
_SET_ASIDE_PATTERN = re.compile(r"step-(\d{8,})\.corrupt-\d+")


def checkpoint_path(run: RunDir, step: int) -> Path:
    """Return the directory of the checkpoint of `step` once it is committed."""
    return run.checkpoints / f"step-{step:08d}"


def committed_steps(run: RunDir) -> list[int]:
    """Return the steps that have a committed checkpoint, newest last.

    Raises:
        UnreadableError: if the file system does not answer.
    """
    try:
        steps = numbers_in_names(run.checkpoints, COMMITTED_PATTERN)
        return [step for step in steps if is_there(checkpoint_path(run, step) / MANIFEST_NAME)]
    except OSError as error:
        raise UnreadableError(
            f"The checkpoints in {run.checkpoints} cannot be read ({type(error).__name__}: {error}). Check that the file system "
            "answers and that you may read there, then try again."
        ) from error


def steps_set_aside(run: RunDir) -> list[int]:
    """Return the steps whose checkpoints did not verify and were renamed (`checkpoint_store.set_checkpoint_aside`)."""
    return sorted(set(numbers_in_names(run.checkpoints, _SET_ASIDE_PATTERN)))
