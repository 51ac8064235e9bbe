"""The records a run keeps of itself: attempts, progress, errors; how they are written and read."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from ddp_hpc.durable import append_json_line, make_directories, read_json, read_json_lines, replace_text
from ddp_hpc.errors import UnreadableError
from ddp_hpc.patience import known, patiently
from ddp_hpc.processes import start_ticks
from ddp_hpc.run_dir import RunDir

log = logging.getLogger(__name__)

_VERDICT_PATIENCE_S = 10.0
"""How long a supervisor waits for the file system to say how the workers ended: the job may have to leave soon."""
_odd: set[tuple[Path, str]] = set()
"""Lines of ledgers that were skipped, of which that is said once."""

Cluster = Literal["local", "slurm"]
Ending = Literal["finished", "stopped", "failed", "refused", "cancelled", "fenced"]
"""How an attempt ended: all steps done; committed because told to stop; an error; input that cannot be; ended by
the user without a commit; shut out by a newer attempt."""
Cause = Literal[
    "finished",
    "refused",
    "cancelled",
    "fenced",
    "stop asked",
    "requeue asked",
    "preempted",
    "time limit",
    "worker crashed",
    "hang",
    "node failed",
    "diverged",
    "unexplained",
    "supervisor died",
    "suspended",
]
"""Why it ended."""
Next = Literal["", "in place", "requeue", "successor", "slurm"]
"""What follows: nothing; another attempt on the same nodes; the job goes back into the queue; a new job; Slurm itself
puts the job back."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt at a run: from the ledger's line of its start, and of its end where it has one."""

    attempt: int
    job_id: str
    host: str
    pid: int
    started_at: float
    """Seconds since the epoch, as all times in the records."""
    pid_start: int | None = None
    """When that process started, in ticks since its host's boot (`processes.start_ticks`)."""
    cluster: Cluster = "local"
    nodes: tuple[str, ...] = ()
    """Of the job, rank zero's first."""
    ends_at: float | None = None
    """When the job's time limit ends it, where that is known."""
    ending: Ending | None = None
    ended_at: float | None = None
    reason: str = ""
    exit_code: int | None = None
    first_step: int = 0
    """Of the newest checkpoint when it began, 0 without one."""
    last_step: int | None = None
    """Of the newest checkpoint when it ended."""
    restart: int = 0
    """How often Slurm had started the job again."""
    cause: Cause | None = None
    next: Next = ""
    failed_nodes: tuple[str, ...] = ()
    """Whose failure it was, where it was a node's."""
    image: str = ""
    """What tells the image that it ran in from others; empty without one, or where nothing tells."""

    @property
    def is_last(self) -> bool:
        """Whether it has ended, and no other is to follow."""
        return self.ending is not None and not self.next

    def lives(self, host: str) -> bool:
        """Return whether its supervisor is a process of this `host`; a later process of the same number is not it."""
        if self.host != host:
            return False
        started = start_ticks(self.pid)
        return started is not None and self.pid_start in (None, started)


@dataclass(frozen=True)
class JobFacts:
    """What an attempt that is a job of Slurm knows besides."""

    nodes: Sequence[str]
    ends_at: float | None = None
    restart: int = 0


def read_attempts(run: RunDir) -> list[Attempt]:
    """Return the attempts of a run, oldest first. A line that is not one of ours is skipped, and that is logged once."""
    return [Attempt(**told) for _, told in sorted(_ledger(run).items()) if told.keys() >= _BEGUN]


def _ledger(run: RunDir) -> dict[int, dict[str, Any]]:
    """Return what the ledger says of each attempt."""
    attempts: dict[int, dict[str, Any]] = {}
    for line in read_json_lines(run.attempts, on_odd=lambda text: _note_odd_line(run, text)):
        told = _told_of_attempt(line)
        if told is None:
            _note_odd_line(run, json.dumps(line))
            continue
        attempt = attempts.setdefault(told["attempt"], {})
        if attempt.get("ending") != "cancelled":  # the user's word is the last: what its processes say then is late
            attempt.update(told)
    return attempts


_BEGUN = {"attempt", "job_id", "host", "pid", "started_at"}
"""What an attempt is known by; a line of its end alone is none."""


def _told_of_attempt(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a line of the ledger says of an attempt; None where that is not what we write."""
    fields = Attempt.__dataclass_fields__
    told = {key: value for key, value in line.items() if key in fields}
    if "attempt" not in told or not all(
        _FITS.get(str(fields[key].type), _is_any)(value) for key, value in told.items()
    ):
        return None
    return {key: tuple(value) if isinstance(value, list) else value for key, value in told.items()}


def _is_any(_: object) -> bool:
    return True


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": _is_number,
    "float | None": lambda value: value is None or _is_number(value),
    "str": lambda value: isinstance(value, str),
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
    "Cluster": lambda value: value in get_args(Cluster),
    "Next": lambda value: value in get_args(Next),
    "Ending | None": lambda value: value is None or value in get_args(Ending),
    "Cause | None": lambda value: value is None or value in get_args(Cause),
}
"""A field's type -> whether a value that was read is of it. By hand, as a library that converts takes 20 ms to import."""


def _note_odd_line(run: RunDir, text: str) -> None:
    if (run.attempts, text) not in _odd:
        _odd.add((run.attempts, text))
        log.warning("%s has a line that is not an attempt's; it is skipped: %.80r", run.attempts, text)


def newest_committed(run: RunDir) -> int:
    """Return the newest step that the run's records say a checkpoint was committed of; 0 where they know of none."""
    progress = read_progress(run)
    told = [step or 0 for attempt in read_attempts(run) for step in (attempt.first_step, attempt.last_step)]
    return max([*told, progress.last_checkpoint or 0 if progress else 0], default=0)


def newest_attempt(run: RunDir) -> int:
    """Return the number of the newest attempt in the ledger, or -1 without one; also of one whose first line is lost."""
    return max(_ledger(run), default=-1)


def record_start(  # noqa: PLR0913  # what a line of the ledger holds
    run: RunDir, *, attempt: int, job_id: str, job: JobFacts | None = None, first_step: int = 0, image: str = ""
) -> None:
    """Write into the ledger that this process begins an attempt; `job` is what a cluster adds to it."""
    about_job = {} if job is None else {"cluster": "slurm", **asdict(job), "nodes": list(job.nodes)}
    append_json_line(
        run.attempts,
        {
            "attempt": attempt,
            "job_id": job_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "pid_start": start_ticks(os.getpid()),
            "started_at": time.time(),
            "first_step": first_step,
            **({"image": image} if image else {}),
            **about_job,
        },
    )


def other_image(attempts: Sequence[Attempt], image: str) -> str:
    """Return what to say where the run began in another image than this; empty where it did not, or nothing tells."""
    before = next((attempt for attempt in reversed(attempts) if attempt.image), None)
    if before is None or not image or before.image == image:
        return ""
    return f"attempt {before.attempt} ran in another image ({before.image}, now {image}): what it comes to may differ"


@dataclass(frozen=True, kw_only=True)
class End:
    """What the ledger's second line of an attempt says besides how it ended."""

    cause: Cause | None = None
    last_step: int | None = None
    next: Next = ""
    failed_nodes: tuple[str, ...] = ()


def record_end(  # noqa: PLR0913  a record's fields
    run: RunDir, *, attempt: int, ending: Ending, exit_code: int, reason: str = "", end: End | None = None
) -> None:
    """Write into the ledger how an attempt ended."""
    append_json_line(
        run.attempts,
        {
            "attempt": attempt,
            "ending": ending,
            "exit_code": exit_code,
            "reason": reason,
            **({} if end is None else asdict(end)),
            "ended_at": time.time(),
        },
    )


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """The newest job that was submitted for a run."""

    job_id: str
    attempt: int
    """The attempt it will begin with."""
    at: float
    cancelled_at: float | None = None
    """When the user took it out of the queue, if so."""
    since: int = 0
    """The attempt that the user's own submission began with; a job that requeued itself keeps it."""


def write_queued_job(run: RunDir, job: QueuedJob) -> None:
    """Note a job that Slurm has taken."""
    replace_text(run.submission, json.dumps(asdict(job)))


def read_queued_job(run: RunDir) -> QueuedJob | None:
    """Return the newest job that was submitted for a run, or None where none was."""
    record = read_json(run.submission) or {}
    try:
        return QueuedJob(**{key: value for key, value in record.items() if key in QueuedJob.__dataclass_fields__})
    except TypeError:
        return None


def write_done(run: RunDir, *, epochs: int, max_steps: int | None) -> None:
    """Note that a run has finished, and how far it was asked to go."""
    replace_text(run.done, json.dumps({"epochs": epochs, "max_steps": max_steps, "at": time.time()}))


def is_done(run: RunDir, *, epochs: int, max_steps: int | None) -> bool:
    """Tell whether a run has gone as far as that; more epochs or steps than before are more to do."""
    done = read_json(run.done)
    return done is not None and (done.get("epochs"), done.get("max_steps")) == (epochs, max_steps)


def ask_to_stop(
    run: RunDir, *, then: Literal["end", "requeue"] = "end", by: Literal["user", "supervisor"] = "user"
) -> None:
    """Ask a run's workers to commit and leave; `then` says what the user wants to follow."""
    replace_text(run.stop_request, json.dumps({"by": by, "then": then}), durable=False)


def read_stop_request(run: RunDir) -> Literal["end", "requeue"] | None:
    """Return what is to follow a stop that the user has asked for, or None where nobody has.

    A file without a word of ours asks too: somebody has made it by hand. One that cannot be looked at does not.
    """
    record = known(run.stop_request, lambda: _stop_request(run), unknown=None)
    if record is None or record.get("by", "user") != "user":
        return None
    return "requeue" if record.get("then") == "requeue" else "end"


def _stop_request(run: RunDir) -> dict[str, Any] | None:
    record = read_json(run.stop_request) or {}
    return record if run.stop_request.exists() else None


def write_verdict(run: RunDir, attempt: int, exit_code: int) -> None:
    """Leave word of how rank zero's processes ended: srun and torchrun make a failure of every code but zero."""
    path = run.verdict(attempt)
    make_directories(path.parent)
    replace_text(path, json.dumps({"exit_code": exit_code}))


def take_verdict(run: RunDir, attempt: int) -> int | None:
    """Return the word that rank zero's processes left, once; None where they had no time to."""
    path = run.verdict(attempt)
    record = patiently(str(path), lambda: read_json(path), patience_s=_VERDICT_PATIENCE_S)
    with suppress(OSError):  # the next attempt has a file of its own
        path.unlink(missing_ok=True)
    return None if record is None else int(record["exit_code"])


def write_rendezvous_token(run: RunDir, attempt: int) -> None:
    """Make the secret by which the ranks of an attempt know each other's words in the store; only the user can read it."""
    path = run.rendezvous_token(attempt)
    make_directories(path.parent)
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, os.urandom(32).hex().encode())
        os.fsync(fd)
    finally:
        os.close(fd)


def read_rendezvous_token(path: Path) -> str:
    """Return the secret that the supervisor has put there for an attempt; wait for a file system that does not show it yet.

    Raises:
        UnreadableError: where it stays away.
    """

    def read() -> str:
        try:
            return path.read_text(encoding="ascii")
        except FileNotFoundError as error:
            raise UnreadableError(str(error)) from error

    return patiently(str(path), read)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the training stands; rank zero replaces it every few seconds."""

    attempt: int
    step: int
    total_steps: int
    epoch: int
    """Epochs completed, plus one: the epoch the next step belongs to, counted from one."""
    epochs: int
    loss: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """The newest evaluation's numbers."""
    last_checkpoint: int | None = None
    last_checkpoint_at: float | None = None
    save_s: float | None = None
    """How long the newest checkpoint took to be committed."""
    save_error: str | None = None
    """Why the newest save failed, where it did."""
    at: float = 0.0


def write_progress(run: RunDir, progress: Progress) -> None:
    """Replace the newest progress; a reader sees the old or the new one, whole."""
    replace_text(run.progress, json.dumps(asdict(progress)), durable=False)


def read_progress(run: RunDir) -> Progress | None:
    """Return the newest progress, or None before the first step."""
    record = read_json(run.progress)
    if record is None:
        return None
    try:
        return Progress(**{key: value for key, value in record.items() if key in Progress.__dataclass_fields__})
    except TypeError:
        return None


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """What is known of a process's death, from itself or from the agent."""

    rank: int
    """-1 for the agent."""
    host: str
    at: float
    step: int
    exception: str
    """Type and message."""
    log: str
    """Where its output is."""
    traceback: str = ""
    is_input_error: bool = False
    """The user asked for something that cannot be (exit 2), rather than something that broke."""
    is_secondary: bool = False
    """The worker died of another's death: a lost connection."""
    is_diverged: bool = False
    """The training came to numbers that are not finite."""


def read_failures(run: RunDir, attempt: int) -> list[WorkerFailure]:
    """Return what died in an attempt, the first cause first: who lost a connection died of another's death."""
    folder = run.attempt_errors(attempt)
    paths: list[Path] = known(folder, lambda: sorted(folder.glob("*.json")), unknown=[])
    records: list[dict[str, Any] | None] = [known(path, partial(read_json, path), unknown=None) for path in paths]
    failures = []
    for record in records:
        try:
            failures.append(WorkerFailure(**(record or {})))
        except TypeError:
            continue
    return sorted(failures, key=lambda failure: (failure.is_secondary, failure.at))


def first_failure(run: RunDir, attempt: int) -> WorkerFailure | None:
    """Return the first to fail, or None where nobody wrote anything down."""
    return next(iter(read_failures(run, attempt)), None)
