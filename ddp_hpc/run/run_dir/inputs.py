"""What an attempt computed with: its world, its configuration, its code; so that its steps can be computed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddp_hpc.base.record import read_record, write_record
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
    write_record(run.inputs(inputs.attempt), inputs, is_secret=True)


def read_inputs(run: RunDir, attempt: int) -> AttemptInputs | None:
    """Return what an attempt computed with; None if that was not recorded, as by older versions."""
    return read_record(run.inputs(attempt), AttemptInputs)
