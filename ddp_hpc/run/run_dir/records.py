"""The records a run keeps of itself: the queued job, progress, errors; how they are written and read."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ddp_hpc.base.durable import make_directories, read_json, record_bytes, record_text, replace_text
from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import ask_once, await_answer
from ddp_hpc.base.record import convert_to_record, read_record, write_record
from ddp_hpc.run.run_dir import ownership
from ddp_hpc.run.run_dir.ledger import Attempt, BackendName, Ledger
from ddp_hpc.run.run_dir.paths import RunDir

_EXIT_CODE_PATIENCE_S = 10.0
"""How long a supervisor waits for a file system that does not answer; not longer, as the time limit may be near."""


def newest_committed_step(run: RunDir, ledger: Ledger | None = None) -> int:
    """Return the newest step that has a committed checkpoint by the run's records; 0 without one."""
    progress, ledger = read_progress(run), ledger or Ledger.read(run)
    return max(ledger.newest_committed_step, progress.last_checkpoint or 0 if progress else 0)


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """The newest job that was submitted for a run."""

    job_id: str
    attempt: int
    """The attempt it will begin with."""
    at: float
    cancelled_at: float | None = None
    """When the user cancelled it, if so."""
    since: int = 0
    """The attempt that the user's own submission began with; a requeued job, or a successor, keeps it."""
    backend: BackendName = "slurm"
    """Whose job it is."""
    slurm_cluster: str = ""
    """The ClusterName of the Slurm that has it; empty where that is not known."""


def attempts_of_submission(ledger: Ledger, queued: QueuedJob | None) -> Sequence[Attempt]:
    """Return the attempts that belong to the user's newest submission; `queued` is the run's record of it."""
    return tuple(one for one in ledger.attempts if queued is None or one.attempt >= queued.since)


def write_queued_job(run: RunDir, job: QueuedJob) -> None:
    """Record a job that Slurm has accepted."""
    write_record(run.submission, job)


def read_queued_job(run: RunDir) -> QueuedJob | None:
    """Return the newest job that was submitted for a run, or None where none was."""
    return read_record(run.submission, QueuedJob)


EndCondition = Literal["ok", "notok", "any"]
"""How a run has to end before another one starts: finished, otherwise, or in any way."""


@dataclass(frozen=True, kw_only=True)
class AwaitedRun:
    """A run whose end a job waits for."""

    path: str
    """The run's directory."""
    job_id: str
    when: EndCondition = "ok"


def write_awaited(run: RunDir, job_id: str, awaited: Sequence[AwaitedRun]) -> None:
    """Record what a run's job waits for, for `status`; Slurm knows only the numbers of the jobs."""
    write_record(run.awaited, {"job_id": job_id, "awaited": [*map(asdict, awaited)]}, durable=False)


def read_awaited(run: RunDir, job_id: str) -> list[AwaitedRun]:
    """Return what this job of a run waits for; empty where that is not known."""
    record = read_json(run.awaited) or {}
    return convert_to_record(record.get("awaited"), list[AwaitedRun]) or [] if record.get("job_id") == job_id else []


def write_done(run: RunDir, goal: Mapping[str, Any]) -> None:
    """Record that a run has finished, and what it was asked to reach."""
    replace_text(run.done, json.dumps({**goal, "at": time.time()}))


def is_done(run: RunDir, goal: Mapping[str, Any]) -> bool:
    """Tell whether a run has reached this goal; another goal makes it unfinished again."""
    done = read_json(run.done)
    return done is not None and all(done.get(key) == value for key, value in json.loads(json.dumps(goal)).items())


def ask_to_stop(
    run: RunDir, *, then: Literal["end", "requeue"] = "end", by: Literal["user", "supervisor"] = "user"
) -> None:
    """Ask a run's workers to commit a checkpoint and exit; `then` says what the user wants to follow."""
    replace_text(run.stop_request, json.dumps({"by": by, "then": then}), durable=False)


def read_stop_request(run: RunDir) -> Literal["end", "requeue"] | None:
    """Return what is to follow a stop that the user has asked for, or None where the user has not.

    A file with other content is a request, too: a user has made it by hand. A file that cannot be read does not count.
    """
    path = run.stop_request
    nothing: tuple[dict[str, Any], bool] = ({}, False)
    record, is_there = ask_once(path, lambda: (read_json(path) or {}, path.exists()), unknown=nothing)
    if not is_there or record.get("by", "user") != "user":
        return None
    return "requeue" if record.get("then") == "requeue" else "end"


def write_rank_zero_exit(run: RunDir, attempt: int, exit_code: int) -> None:
    """Record rank zero's exit code in a file: srun and torchrun treat every code but zero as a failure."""
    write_record(run.rank_zero_exit(attempt), {"exit_code": exit_code})


def take_rank_zero_exit(run: RunDir, attempt: int) -> int | None:
    """Return the exit code that rank zero recorded, once; None where it had no time to."""
    path = run.rank_zero_exit(attempt)
    record = await_answer(str(path), lambda: read_json(path), patience_s=_EXIT_CODE_PATIENCE_S)
    with suppress(OSError):  # the next attempt has a file of its own
        path.unlink(missing_ok=True)
    return None if record is None else int(record["exit_code"])


def write_remark(run: RunDir, attempt: int, rank: int, text: str) -> None:
    """Record what users should know of a run that has finished; `status` shows it."""
    replace_text(run.remark(attempt, rank), text)


def read_remarks(run: RunDir, attempt: int, world_size: int) -> list[str]:
    """Return what the ranks of an attempt have remarked, rank zero first."""
    paths = (run.remark(attempt, rank) for rank in range(world_size))
    return [record_text(path) for path in paths if path.exists()]


def write_rendezvous_token(path: Path) -> None:
    """Write a secret by which ranks know each other, and authenticate what they store; only the user can read it."""
    make_directories(path.parent)
    replace_text(path, os.urandom(32).hex(), is_secret=True)


def read_rendezvous_token(path: Path) -> str:
    """Return the secret that the supervisor has written for an attempt; wait for a file system that does not show it yet."""
    # An NFS client keeps what it knows of a directory for some seconds, so a file that another node has just made may be
    # missing here (nfs(5), "acdirmin" and "lookupcache", https://man7.org/linux/man-pages/man5/nfs.5.html).

    def read() -> str:
        try:
            return record_bytes(path).decode("ascii")
        except FileNotFoundError as error:
            raise UnreadableError(str(error)) from error

    return await_answer(str(path), read)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far the training is; rank zero replaces it every few seconds."""

    attempt: int
    step: int = 0
    total_steps: int | None = None
    """None for a script, whose steps are not known, as is its epoch."""
    epoch: int | None = None
    """Epochs completed, plus one: the epoch the next step belongs to, counted from one."""
    epochs: int | None = None
    saves: int | None = None
    """How many looks have found that a script has saved its state (`script.progress`); None for a training by a recipe."""
    loss: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    """None where the recipe does not say how many tokens a sample has."""
    eta_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest evaluation's numbers."""
    last_checkpoint: int | None = None
    last_checkpoint_at: float | None = None
    save_s: float | None = None
    """How long the newest checkpoint took to be committed."""
    save_error: str | None = None
    """Why the newest save failed, where it did."""
    save_bytes: dict[str, int] = field(default_factory=dict)
    """How much a save takes of the memory of rank zero's `host` and `gpu`."""
    at: float = 0.0


def save_memory_text(save_bytes: Mapping[str, int]) -> str:
    """Return `1.20 GB of each worker's memory, and 1.20 GB of its GPU's while it copies`; empty where nothing is known."""
    told = {of: f"{num / 1e9:.2f} GB" if num >= 10**8 else f"{num / 1e6:.1f} MB" for of, num in save_bytes.items()}
    host = f"{told['host']} of each worker's memory" if "host" in told else ""
    return f"{host}, and {told['gpu']} of its GPU's while it copies" if "gpu" in told else host


NON_METRIC_FIELDS = ("kind", "step", "epoch", "at")
"""The fields of each line of `metrics.jsonl`; the others are the numbers of its step, by name."""


def metrics_of_line(line: dict[str, Any]) -> dict[str, float]:
    """Return a line's numbers, without the step, epoch and time at which they were measured."""
    return {
        name: value for name, value in line.items() if name not in NON_METRIC_FIELDS and isinstance(value, (int, float))
    }


def write_progress(run: RunDir, progress: Progress) -> None:
    """Replace the newest progress; a reader sees the old or the new one, whole.

    Raises:
        FencedError: if an attempt newer than that of `progress` has claimed the run.
        OSError: if it cannot be written.
    """
    ownership.replace_record(run, progress.attempt, run.progress, json.dumps(asdict(progress)), durable=False)


def read_progress(run: RunDir) -> Progress | None:
    """Return the newest progress, or None before the first step."""
    return read_record(run.progress, Progress, may_have_nan=True)


def failed_save(error: str) -> str:
    """Return what a save that has failed means for its run, which trains on."""
    return f"the newest save failed: {error}; the training goes on, each save tries again, and the run ends if all saves of `checkpoint.max_failing_s` seconds fail"


REPORTED_FIELDS = ("step", "loss", "samples_per_s", "metrics", "last_checkpoint", "last_checkpoint_at")
"""The fields of `Progress` that a script may report by `attach`; the last two count in later attempts, too."""


def write_script_report(run: RunDir, report: Mapping[str, Any]) -> None:
    """Replace what a script says of itself, its attempt and some of `REPORTED_FIELDS`; the process beside the script adds it to its progress."""
    replace_text(run.script_report, json.dumps(report), durable=False)


def with_script_report(run: RunDir, progress: Progress) -> Progress:
    """Return a script's progress with what the script says of itself, if it does."""
    record = read_json(run.script_report) or {}
    names = REPORTED_FIELDS if record.get("attempt") == progress.attempt else REPORTED_FIELDS[-2:]
    return replace(progress, **{key: record[key] for key in names if record.get(key) is not None})
