"""What a job waits for, and why it never started, by the records of the runs that it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_hpc.run.run_dir.ledger import Ending, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import AwaitedRun, EndCondition, read_awaited, read_queued_job

_UNTIL: Mapping[EndCondition, str] = {"ok": "has finished", "notok": "has ended without finishing", "any": "has ended"}
"""How a run has to end -> what the job waits for."""
_ENDING_TEXTS = {Ending.FINISHED: "has finished", Ending.CANCELLED: "was cancelled", Ending.STOPPED: "was stopped"}
_MOST_LINKS = 100
"""Runs whose records name each other, as a user may have edited them, are not followed for ever."""


def awaited_text(awaited: Sequence[AwaitedRun]) -> str:
    """Return what a job waits for: `the job waits until digits-train has finished`; empty where that is not known."""
    until = " and ".join(f"{Path(one.path).name} {_UNTIL[one.when]}" for one in awaited)
    return until and f"the job waits until {until}"


def why_never_started(awaited: Sequence[AwaitedRun], *, links: int = _MOST_LINKS) -> str:
    """Return which run has ended otherwise than a job had to wait for; empty where the records show none."""
    return next(filter(None, (_wrong_end(one, links) for one in awaited)), "")


def _wrong_end(one: AwaitedRun, links: int) -> str:
    run = RunDir(Path(one.path))
    of_job = [attempt for attempt in Ledger.read(run).attempts if attempt.job_id == one.job_id]
    if of_job:
        last = of_job[-1]
        has_finished = last.ending == Ending.FINISHED
        if not last.is_last or last.ending is None or one.when == "any" or has_finished == (one.when == "ok"):
            return ""
        reason = f" ({last.reason.rstrip('.')})" if last.ending not in _ENDING_TEXTS and last.reason else ""
        return f"{run.name} {_ENDING_TEXTS.get(last.ending, 'failed')}{reason}"
    queued = read_queued_job(run)
    if one.when != "ok" or queued is None or queued.job_id != one.job_id or not links:
        return ""
    if queued.cancelled_at is not None:
        return f"{run.name} was cancelled"
    why = why_never_started(read_awaited(run, one.job_id), links=links - 1)
    return f"{run.name} did not start, because {why}" if why else ""
