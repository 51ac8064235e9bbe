"""What one check of the doctor says."""

from __future__ import annotations

from ddp_hpc.run.run_dir.preflight import Finding, Level


def finding(level: Level, found: str, to_do: str = "", nodes: tuple[str, ...] = ()) -> Finding:
    """Return a finding without the name of its check, which the table of checks has."""
    return Finding(check="", level=level, found=found, to_do=to_do, nodes=nodes)
