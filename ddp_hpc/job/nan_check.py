"""Whether the workers of a job check gradients for NaN before they exchange them (`debug.nan`)."""

from __future__ import annotations

from typing import Literal

from ddp_hpc.run.run_dir.ledger import Attempt, Cause


def nan_check_rule(asked: Literal["auto", "always", "never"], newest: Attempt | None, *, ends_at_nan: bool) -> str:
    """Return why they do, as a text; empty where they do not. `newest` is the run's newest attempt before the job's."""
    if asked == "always":
        return "`debug.nan` is `always`"
    if asked == "auto" and ends_at_nan and newest is not None and newest.cause == Cause.DIVERGED:
        return f"attempt {newest.attempt} ended because the loss was not finite (`debug.nan`): this names the rank"
    return ""
