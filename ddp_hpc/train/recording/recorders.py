"""What gets the numbers of a run besides its directory: the protocol, and the table of back ends.

`metrics.jsonl` is the record of a run. Each other recorder follows that file in a process of its own (`follower`), and
sends what its back end lacks, from the first line on. So no recorder can stop or delay a training, and each has each step
once. To add one: a module beside `to_tensorboard` with a function `open_recorder`, its line in `BACK_ENDS`, its name in `spec`.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from ddp_hpc.base.durable import read_json, replace_text
from ddp_hpc.base.names import shorten_names
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import NON_METRIC_FIELDS
from ddp_hpc.run.spec.training import RecorderName

log = logging.getLogger(__name__)

BACK_ENDS: Mapping[RecorderName, str] = {
    "tensorboard": "ddp_hpc.train.recording.to_tensorboard",
    "wandb": "ddp_hpc.train.recording.to_wandb",
    "mlflow": "ddp_hpc.train.recording.to_mlflow",
}
"""Recorder -> the module that writes to it. Each imports its library where the module begins."""

Ending = Literal["finished", "stopped", "failed"]
"""How an attempt has ended, as far as rank zero knows: at the run's last step, by a stop, by an exception."""

_NULL_IF_UNKNOWN = frozenset({"samples_per_s", "tokens_per_s", "skipped_updates"})
"""These are null where they are not known; any other number is null where it is NaN or infinite, as JSON has neither."""


@dataclass(frozen=True)
class MetricsRow:
    """The numbers of one line of `metrics.jsonl`."""

    step: int
    at: float
    """When it was measured, in seconds since the epoch."""
    numbers: Mapping[str, float]
    """By tag: `train/loss`, `eval/accuracy`. NaN where the line has null."""


def row_of(line: Mapping[str, Any]) -> MetricsRow | None:
    """Return what recorders get of a line of the metrics; None for one without a kind, a step or a time."""
    kind, step, at = line.get("kind"), line.get("step"), line.get("at")
    if not isinstance(kind, str) or not isinstance(step, int) or not isinstance(at, (int, float)):
        return None
    numbers: dict[str, float] = {}
    for name, value in line.items():
        if name in NON_METRIC_FIELDS:
            continue
        if isinstance(value, (int, float)):
            numbers[f"{kind}/{name}"] = float(value)
        elif value is None and name not in _NULL_IF_UNKNOWN:
            numbers[f"{kind}/{name}"] = math.nan
    return MetricsRow(step, float(at), numbers)


_MOST_NAMED = 8
"""So many steps are named in a warning."""


class SentNumbers:
    """The numbers that a back end has, where it cannot take one back: the first value of each step counts."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], float] = {}
        """By step and tag."""
        self._changed: set[int] = set()

    def add_if_new(self, step: int, tag: str, value: float) -> bool:
        """Tell whether a number is new, and take it as sent then; note a step that has come out otherwise than before."""
        if (step, tag) not in self.values:
            self.values[step, tag] = value
            return True
        first = self.values[step, tag]
        is_same = math.isclose(first, value, rel_tol=1e-4) or (math.isnan(first) and math.isnan(value))
        if not is_same and not tag.endswith("_per_s"):
            self._changed.add(step)
        return False

    def warn_of_changes(self) -> None:
        """Log which steps have come out otherwise, if any have since the last call."""
        if self._changed:
            steps = [str(step) for step in sorted(self._changed)]
            log.warning(
                "steps that were repeated have other values than the first time: %s. This recorder keeps their first values; metrics.jsonl has the new ones.",
                shorten_names(steps, _MOST_NAMED),
            )
        self._changed = set()


class Recorder(Protocol):
    """What gets the rows of a run, from its first step on in each attempt; it knows which of them it has."""

    def record(self, row: MetricsRow) -> None:
        """Take a row; do nothing with numbers of steps that are there already."""

    def flush(self) -> None:
        """Write or send what was taken."""

    def close(self, ending: Ending) -> None:
        """Say how the attempt has ended, after a `flush`."""


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The run that is recorded, and where."""

    run: RunDir
    id: str
    """Under which back ends know it (`identity_of`)."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Its configuration by key, without values that may be secrets."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Where users name a server, a project, a directory."""


def identity_of(run: RunDir) -> str:
    """Return the id under which recorders know a run, the same in all its attempts.

    A copy of a run's directory, and one that was moved, gets an id of its own: two runs under one id would mix their steps.
    Symbolic links to one directory lead to one id.
    """
    known, path = read_json(run.recorded_as) or {}, os.path.realpath(run.path)
    if os.path.realpath(str(known.get("path"))) != path or not isinstance(known.get("id"), str):
        known = {"id": os.urandom(8).hex(), "path": path}
        replace_text(run.recorded_as, msgspec.json.encode(known).decode())
    return str(known["id"])
