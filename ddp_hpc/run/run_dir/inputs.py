"""What an attempt computed with: its world, its configuration, its code; so that its steps can be computed again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ddp_hpc.base.durable import make_directories, read_json, replace_text
from ddp_hpc.run.run_dir.paths import RunDir

CHANGES_NO_NUMBER = frozenset(
    {
        *("name", "runs_dir", "launcher", "slurm", "restart", "notify", "snapshot", "network"),
        *("checkpoint", "log", "integrity", "preflight", "debug"),
    }
)
"""Sections of the configuration, and keys outside of them, that change no computed number."""


@dataclass(frozen=True, kw_only=True)
class AttemptInputs:
    """What rank zero of an attempt was given."""

    attempt: int
    world_size: int
    config: str
    """The resolved configuration, as the run's directory held it then; a later submission may replace that file."""
    import_paths: tuple[str, ...] = ()
    """Where the user's code was imported from; in a job of Slurm, the snapshot."""
    work_dir: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    """File of the user's code that was imported -> hash of its content (xxh3_64)."""


def write_inputs(run: RunDir, inputs: AttemptInputs) -> None:
    """Write what an attempt computes with; the configuration may hold secrets, so only the owner may read it."""
    path = run.inputs(inputs.attempt)
    make_directories(path.parent)
    replace_text(path, json.dumps(asdict(inputs)), is_secret=True)


def read_inputs(run: RunDir, attempt: int) -> AttemptInputs | None:
    """Return what an attempt computed with; None if that was not recorded, as by older versions.

    Raises:
        OSError: if the record exists, and may not be read.
    """
    record = read_json(run.inputs(attempt))
    try:
        known = {key: value for key, value in (record or {}).items() if key in AttemptInputs.__dataclass_fields__}
        known["import_paths"] = tuple(known.get("import_paths", ()))
        return AttemptInputs(**known)
    except TypeError:
        return None
