"""Reads a run's checkpoint in the user's own Python, outside of any run: `ddp_hpc.load_checkpoint`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_hpc.base.errors import ConfigError, CorruptCheckpointError, UnreadableError
from ddp_hpc.run.checkpoints import checkpoint_store
from ddp_hpc.run.checkpoints.checkpoint_names import MANIFEST_NAME, checkpoint_path, committed_steps
from ddp_hpc.run.checkpoints.shards import select_by_prefix
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.train.state.restore import to_torch

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A committed checkpoint, each byte of which was compared with its checksum."""

    path: Path
    """Its directory."""
    step: int
    metrics: Mapping[str, float]
    """Of the evaluation at this step; empty if there was none."""
    weights: Mapping[str, Tensor]
    """The model's `state_dict`, on the CPU; empty for files that a script has saved: read those in `path`, with what wrote them."""
    ema: Mapping[str, Tensor]
    """The moving average of the weights (`train.ema_decay`); empty if there is none."""


def load_checkpoint(source: str | Path | os.PathLike[str], *, step: int | None = None) -> Checkpoint:
    """Return the newest checkpoint of a run that is not damaged, as the run's next attempt would find it. No code is run, nothing is unpickled.

    Args:
        source: The run's directory (`runs/digits`), or the directory of one checkpoint.
        step: The checkpoint of this step, and no other; unset: the newest.

    Raises:
        ConfigError: where there is no such run or checkpoint.
        CorruptCheckpointError: where the checkpoint that is asked for, or each one of the run, is damaged.
        UnreadableError: where the file system does not answer.
    """
    path = Path(source)
    if step is None and (path / MANIFEST_NAME).is_file():
        return _load(path)
    run = RunDir(path.absolute())
    while True:
        steps = committed_steps(run)
        if not steps or (step is not None and step not in steps):
            asked = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            there = "Name the directory of a run, such as `runs/digits`"
            if steps:
                there = f"Steps with a checkpoint: {', '.join(map(str, steps))}"
            raise ConfigError(
                f"The checkpoint of {str(source)!r} was asked for, but there is {asked} in {run.checkpoints}. {there}."
            )
        try:
            return _load_newest_sound(run, steps if step is None else [step])
        except (UnreadableError, CorruptCheckpointError):
            # A run that goes on deletes its older checkpoints, perhaps while one of them is read.
            if set(steps) <= set(committed_steps(run)):
                raise


def _load_newest_sound(run: RunDir, steps: Sequence[int]) -> Checkpoint:
    for number in reversed(steps[1:]):
        try:
            return _load(checkpoint_path(run, number))
        except CorruptCheckpointError as error:
            if number not in committed_steps(run):
                raise
            log.warning("The checkpoint of step %d is damaged, so an older one is read: %s", number, error)
    return _load(checkpoint_path(run, steps[0]))


def _load(path: Path) -> Checkpoint:
    manifest = checkpoint_store.read_manifest(path)
    raw: Mapping[str, Any] = {}
    if checkpoint_store.FOREIGN_FILES_KEY in manifest.state:
        checkpoint_store.verify_checkpoint(path)
    else:
        raw = checkpoint_store.read_tensors(path, manifest)
    weights, ema = _copied_tensors(raw, "model/"), _copied_tensors(raw, "ema/")
    return Checkpoint(path=path, step=manifest.step, metrics=manifest.metrics, weights=weights, ema=ema)


def _copied_tensors(raw: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
    # Copied, because each of them keeps all that was read from its file in memory, the optimizer's state too.
    return {name: to_torch(one).clone() for name, one in select_by_prefix(prefix, raw).items()}
