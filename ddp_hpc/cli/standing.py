"""A run's status in words."""

from __future__ import annotations

from ddp_hpc.cli.words import duration, number, numbers
from ddp_hpc.watch.status import RunStatus


def as_text(status: RunStatus) -> str:
    """Return the status in lines of a word and what it is."""
    rows = {
        "run": f"{status.run}  ({status.path})",
        "state": status.state,
        "reason": status.reason,
        "step": steps(status) + ("" if status.epoch is None else f", epoch {status.epoch} of {status.epochs}"),
        "loss": "" if status.loss is None else number(status.loss),
        "rate": rate(status),
        "evaluation": numbers(status.metrics),
        "checkpoint": "" if status.last_checkpoint is None else f"step {status.last_checkpoint}",
        "save error": status.save_error or "",
        "attempt": "" if status.attempt is None else f"{status.attempt} (job {status.job_id} on {status.host})",
        "read": f"{status.source}, written {duration(status.age_s)} ago",
    }
    return "\n".join(f"{word:<11} {text}" for word, text in rows.items() if text)


def steps(status: RunStatus) -> str:
    """Return `120 of 450`."""
    return f"{status.step}" if status.total_steps is None else f"{status.step} of {status.total_steps}"


def rate(status: RunStatus) -> str:
    """Return samples/s, and the time left where the run goes on."""
    told = [] if status.samples_per_s is None else [f"{status.samples_per_s:.0f} samples/s"]
    return ", ".join(told + ([] if status.eta_s is None else [f"{duration(status.eta_s)} left"]))
