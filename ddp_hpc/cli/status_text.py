"""A run's status as text."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_hpc.cli.formatting import duration, named_numbers, number
from ddp_hpc.run.run_dir.records import failed_save, metrics_of_line, save_memory_text
from ddp_hpc.watch.status import RunStatus


def as_text(status: RunStatus, *, now: float, word: str | None = None, details: Mapping[str, str] | None = None) -> str:
    """Return the status, one line for each field: its name and its value; `details` have lines among them.

    `word` names the run on the command line.
    """
    epoch = "" if status.epoch is None else f", epoch {status.epoch} of {status.epochs}"
    job = "" if status.job_id is None else f" (job {status.job_id} on {status.host})"
    rows = {
        "run": f"{status.run}  ({status.path})",
        "state": status.state,
        "reason": status.reason,
        "concerns": status.entity,
        "mended": status.mended,
        "why": f"`ddp-hpc why {word or status.run}` explains it" if status.state == "failed" else "",
        "starts": ""
        if status.starts_at is None
        else f"in about {duration(status.starts_at - now)}, by Slurm's estimate",
        "step": steps_text(status) + epoch if knows_steps(status) else "",
        "saved": last_save_text(status),
        "loss": "" if status.loss is None else number(status.loss),
        "rate": rate_text(status),
        "time limit": time_limit_text(status),
        "evaluation": named_numbers(status.metrics),
        "checkpoint": checkpoint_text(status),
        "save takes": save_memory_text(status.save_bytes),
        "save error": failed_save(status.save_error) if status.save_error and status.is_alive else status.save_error,
        "slow": "; ".join(one.sentence() for one in status.slow_ranks),
        **(details or {}),
        "attempt": "" if status.attempt is None else f"{status.attempt}{job}",
        "job": "" if status.job_id is None or status.attempt is not None else status.job_id,
        "source": f"{status.source}, {duration(status.age_s)} ago",
    }
    return "\n".join(f"{word:<11} {text}" for word, text in rows.items() if text)


def knows_steps(status: RunStatus) -> bool:
    """Tell whether the run's steps are known: a script's are where it reports them (`attach`)."""
    return status.saves is None or status.step > 0


def steps_text(status: RunStatus) -> str:
    """Return `120 of 450`; `-` for a script whose steps are not known."""
    if not knows_steps(status):
        return "-"
    return f"{status.step}" if status.total_steps is None else f"{status.step} of {status.total_steps}"


def last_save_text(status: RunStatus) -> str:
    """Return when a script has last saved its state: `35 s ago`."""
    # How often is not known: saves to one file between two looks at it are one change.
    return f"{duration(status.checkpoint_age_s)} ago" if status.saves and status.checkpoint_age_s is not None else ""


def rate_text(status: RunStatus) -> str:
    """Return samples/s, tokens/s where they are known, and the time left where the run goes on."""
    rates = ((status.samples_per_s, "samples/s"), (status.tokens_per_s, "tokens/s"))
    told = [f"{value:.0f} {unit}" for value, unit in rates if value is not None]
    return ", ".join(told + ([] if status.eta_s is None else [f"{duration(status.eta_s)} left"]))


def time_limit_text(status: RunStatus) -> str:
    """Return when the job's time limit ends it, and whether that is enough."""
    if status.limit_s is None:
        return ""
    ends = f"ends the job in {duration(max(status.limit_s, 0))}"
    if status.eta_s is None:
        return ends
    return f"{ends}, {'enough' if status.eta_s < status.limit_s else 'not enough to finish: the run writes a checkpoint before that, and its next job continues from there'}"


def checkpoint_text(status: RunStatus) -> str:
    """Return `step 120, 35 s ago`."""
    if status.last_checkpoint is None:
        return ""
    age = "" if status.checkpoint_age_s is None else f", {duration(status.checkpoint_age_s)} ago"
    return f"step {status.last_checkpoint}{age}"


def progress_line(status: RunStatus) -> str:
    """Return a line on where the run stands."""
    is_of_script = status.saves is not None and status.step > 0
    if status.state == "waiting" or (status.total_steps is None and not is_of_script):
        return "  ".join(filter(None, [status.state, status.reason]))
    parts = [status.state, f"step {steps_text(status)}"]
    parts += [] if status.epoch is None else [f"epoch {status.epoch} of {status.epochs}"]
    parts += [] if status.loss is None else [f"loss {number(status.loss)}"]
    return "  ".join([*parts, *filter(None, [rate_text(status)])])


def evaluation_line(line: dict[str, object]) -> str:
    """Return a line on one evaluation."""
    return f"evaluation  step {line['step']}  {named_numbers(metrics_of_line(line))}"
