"""What one check of the doctor says."""

from __future__ import annotations

from typing import NamedTuple

from ddp_hpc.run.run_dir.preflight import Level


class DoctorAnswer(NamedTuple):
    """A finding without the name of its check, which the table of checks has."""

    level: Level
    found: str
    to_do: str = ""
    """Empty where nothing has to be done."""
    nodes: tuple[str, ...] = ()
    """The nodes that it concerns."""
