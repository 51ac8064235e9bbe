"""How busy a run's machines are, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ddp_hpc.base.patience import known
from ddp_hpc.cli.formatting import duration
from ddp_hpc.run.run_dir.machine_use import MachineUse, newest_uses, recent_uses, summary_of
from ddp_hpc.run.run_dir.machine_words import sentence
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.status import RunStatus


def uses_of_run(run: RunDir, status: RunStatus) -> Sequence[MachineUse]:
    """Return the newest line of each node while the run is alive, and the newest lines of the newest attempt after it."""
    attempt = status.attempt
    if attempt is None:
        return []
    read = newest_uses if status.is_alive else recent_uses
    return known(run.attempt_logs(attempt), lambda: read(run, attempt), unknown=[])


def as_record(uses: Sequence[MachineUse]) -> Mapping[str, Any] | None:
    """Return what `--json` prints as `machines`; None where nothing was measured."""
    summary = summary_of(uses)
    if summary is None:
        return None
    newest = {use.node_rank: use for use in sorted(uses, key=lambda use: use.at)}
    return {**asdict(summary), "nodes": [asdict(use) for _, use in sorted(newest.items())]}


def as_line(uses: Sequence[MachineUse], status: RunStatus, *, now: float) -> str:
    """Return one line; empty where nothing was measured."""
    summary = summary_of(uses)
    if summary is None:
        return ""
    when = (
        f"{duration(max(0.0, now - summary.at))} ago"
        if status.is_alive
        else f"the mean of the last {duration(summary.seconds)} of the newest attempt"
    )
    return f"{sentence(summary)}, {when}"
