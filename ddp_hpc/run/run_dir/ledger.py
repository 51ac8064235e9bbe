"""The ledger of a run, `attempts.jsonl`: a line for the start of each attempt and a line for its end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import msgspec

from ddp_hpc.base import exit_codes
from ddp_hpc.base.durable import append_json_line, read_json_lines
from ddp_hpc.base.field_types import annotations_of
from ddp_hpc.base.processes import host_name, start_ticks
from ddp_hpc.base.record import convert_to_record
from ddp_hpc.run.run_dir.paths import RunDir

_odd_lines: set[tuple[Path, str]] = set()
"""Lines of ledgers that were skipped, each of which is logged once."""

BackendName = str
"""The name of the back end that started an attempt (`submission.backend.BACKENDS`)."""


class _TextEnum(str, Enum):
    """A member that is its own text: in JSON, in messages, and where it is compared with a text."""

    # `Enum` prints `Cause.HANG` from Python 3.12 on, and from 3.8 to 3.11 only outside of f-strings. Each version takes this
    # method for f-strings too (https://docs.python.org/3/library/enum.html#enum.StrEnum, which is new in 3.11).
    __str__ = str.__str__


class Ending(_TextEnum):
    """How an attempt ended."""

    FINISHED = "finished"
    """All steps are done."""
    STOPPED = "stopped"
    """It committed because it was asked to stop."""
    FAILED = "failed"
    REFUSED = "refused"
    """The input is invalid."""
    CANCELLED = "cancelled"
    """The user ended it without a commit."""
    FENCED = "fenced"
    """A newer attempt has taken the run."""

    @property
    def exit_code(self) -> int:
        """The exit code of the supervisor of such an attempt."""
        return _CODE_BY_ENDING.get(self, exit_codes.FAILED)


_CODE_BY_ENDING: Mapping[Ending, int] = {
    Ending.FINISHED: exit_codes.FINISHED,
    Ending.STOPPED: exit_codes.STOPPED,
    Ending.REFUSED: exit_codes.REFUSED,
    Ending.FENCED: exit_codes.FENCED,
}


class Cause(_TextEnum):
    """Why an attempt ended."""

    FINISHED = "finished"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    FENCED = "fenced"
    STOP_ASKED = "stop asked"
    REQUEUE_ASKED = "requeue asked"
    SCRIPT_ASKED = "script asked"
    PREEMPTED = "preempted"
    TIME_LIMIT = "time limit"
    WORKER_CRASHED = "worker crashed"
    HANG = "hang"
    NODE_FAILED = "node failed"
    DIVERGED = "diverged"
    RANKS_DIFFER = "ranks differ"
    NOT_SAVED = "not saved"
    UNEXPLAINED = "unexplained"
    SUPERVISOR_DIED = "supervisor died"
    SUSPENDED = "suspended"
    PREFLIGHT = "preflight"


class Next(_TextEnum):
    """What follows an attempt; `NOTHING` is false."""

    NOTHING = ""
    IN_PLACE = "in place"
    """Another attempt on the same nodes."""
    REQUEUE = "requeue"
    """The job goes back into the queue."""
    SUCCESSOR = "successor"
    """A new job follows this one."""
    SLURM = "slurm"
    """Slurm itself puts the job back into the queue."""


@dataclass(frozen=True, kw_only=True)
class RootFailure:
    """The failure that came first in an attempt; without fields, none is known."""

    fingerprint: str = ""
    entity: str = ""
    entity_version: str = ""
    may_recover: bool = True
    failed_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class PartialEnd:
    """What may be known of an attempt's end."""

    ending: Ending | None = None
    """None as long as no end is recorded."""
    exit_code: int | None = None
    """Of the supervisor; minus the number of a signal."""
    reason: str = ""
    ended_at: float | None = None
    cause: Cause | None = None
    last_step: int | None = None
    """Of the newest checkpoint when it ended."""
    next: Next = Next.NOTHING
    failed_nodes: tuple[str, ...] = ()
    """The nodes that failed, where a node did."""
    root: RootFailure = field(default_factory=RootFailure)
    why_last: str = ""
    """Why no attempt follows, where one might be expected."""


@dataclass(frozen=True, kw_only=True)
class End(PartialEnd):
    """How an attempt ended, and what follows: the ledger's second line of it."""

    ending: Ending
    exit_code: int = exit_codes.FAILED

    @property
    def as_record(self) -> Mapping[str, Any]:
        """The keys of the line that say something; the others leave what an earlier line says of the same attempt."""
        flat, default = _flatten_end(self), _flatten_end(End(ending=self.ending))
        always = {"ending", "exit_code", "reason", *(["next"] if self.cause else [])}
        return {key: value for key, value in flat.items() if key in always or value != default[key]}


def _flatten_end(end: End) -> dict[str, Any]:
    record = asdict(end)
    root = record.pop("root")
    return {**record, **root}


@dataclass(frozen=True, kw_only=True)
class Attempt(PartialEnd):
    """One attempt at a run: from the ledger's line of its start, and of its end where it has one."""

    attempt: int
    job_id: str
    host: str
    pid: int
    started_at: float
    """Seconds since the epoch, as all times in the records."""
    pid_start: int | None = None
    """When that process started, in ticks since its host's boot (`processes.start_ticks`)."""
    cluster: BackendName = "local"
    nodes: tuple[str, ...] = ()
    """Of the job, rank zero's first."""
    ends_at: float | None = None
    """When the job's time limit ends it, where that is known."""
    first_step: int = 0
    """Of the newest checkpoint when it began, 0 without one."""
    restart: int = 0
    """How often Slurm had started the job again."""
    queued_at: float | None = None
    """When the job that begins with this attempt was put into the queue, where that is known."""
    image: str = ""
    """Identity of the image that it ran in; empty without an image, or where that is not known."""

    @property
    def end(self) -> End | None:
        """How it ended; None as long as no end is recorded."""
        return None if self.ending is None else End(**{one.name: getattr(self, one.name) for one in fields(End)})

    @property
    def is_last(self) -> bool:
        """Whether it has ended, and no other is to follow."""
        return self.ending is not None and not self.next

    def is_alive_on(self, host: str) -> bool:
        """Return whether its supervisor runs on this `host`; a later process with the same pid does not count."""
        if self.host != host:
            return False
        started = start_ticks(self.pid)
        return started is not None and self.pid_start in (None, started)


@dataclass(frozen=True)
class Ledger:
    """The content of a run's ledger at the moment when it was read: once for each decision."""

    attempts: Sequence[Attempt] = ()
    """Oldest first."""
    newest_number: int = -1
    """The number of the newest attempt, also of one whose first line is lost; -1 without one."""

    @classmethod
    def read(cls, run: RunDir) -> Ledger:
        """Read the ledger; skip a line that does not record an attempt, and log that once."""
        said = _fields_by_attempt(run)
        attempts = tuple(_make_attempt(known) for _, known in sorted(said.items()) if known.keys() >= _START_KEYS)
        return cls(attempts, max(said, default=-1))

    @property
    def newest(self) -> Attempt | None:
        """The newest attempt, or None before the first."""
        return self.attempts[-1] if self.attempts else None

    def attempt(self, number: int) -> Attempt | None:
        """Return the attempt of this number, or None where its start was not written."""
        return next((one for one in self.attempts if one.attempt == number), None)

    def newest_before(self, number: int) -> Attempt | None:
        """Return the newest attempt that is older than `number`."""
        return next((one for one in reversed(self.attempts) if one.attempt < number), None)

    @property
    def newest_committed_step(self) -> int:
        """The newest step of which the ledger says that a checkpoint was committed; 0 without one."""
        return max((step or 0 for one in self.attempts for step in (one.first_step, one.last_step)), default=0)

    def image_warning(self, image: str) -> str:
        """Return a warning where an earlier attempt ran in another image than this; else an empty text."""
        before = next((one for one in reversed(self.attempts) if one.image), None)
        if before is None or not image or before.image == image:
            return ""
        return (
            f"attempt {before.attempt} ran in another image ({before.image}, now {image}), so results may differ; "
            "to go back to that one, name it in `container.image`"
        )


def _fields_by_attempt(run: RunDir) -> dict[int, dict[str, Any]]:
    """Return what the ledger says of each attempt, by its number."""
    attempts: dict[int, dict[str, Any]] = {}
    for line in read_json_lines(run.attempts, on_odd=lambda text: _note_odd_line(run, text)):
        said = _parse_line(line)
        if said is None:
            _note_odd_line(run, json.dumps(line))
            continue
        attempt = attempts.setdefault(said["attempt"], {})
        # A cancellation stays: the processes of the cancelled attempt may write a line of their own after it.
        if attempt.get("ending") != Ending.CANCELLED:
            attempt.update(said)
    return attempts


_START_KEYS = {"attempt", "job_id", "host", "pid", "started_at"}
"""Keys of the line of a start; an attempt without them has only the line of its end."""


def _parse_line(line: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a line says of an attempt, by the names of fields; None where a value is not of its field's type."""
    found = convert_to_record(line, _line_type())
    said = {} if found is None else msgspec.structs.asdict(found)
    if not said or any(isinstance(value, float) and not isfinite(value) for value in said.values()):
        return None
    return {key: value for key, value in said.items() if value is not msgspec.UNSET}


@cache
def _line_type() -> type[msgspec.Struct]:
    """Return the type of a line: what `Attempt`, `End` and `RootFailure` have, of which a line leaves out all but the attempt's number."""
    types = {**annotations_of(RootFailure), **annotations_of(Attempt), **annotations_of(End)}
    # The number is always there. A line has the fields of `RootFailure` in the place of `root`.
    optional = [
        (name, kind | msgspec.UnsetType, msgspec.UNSET)
        for name, kind in types.items()
        if name not in {"attempt", "root"}
    ]
    return msgspec.defstruct("Line", [("attempt", int), *optional])


def _make_attempt(known: Mapping[str, Any]) -> Attempt:
    start, end, root = (
        {name: known[name] for name in kind if name in known} for kind in (_START_FIELDS, _OF_END, _OF_ROOT)
    )
    if "ending" not in end:
        return Attempt(**start)
    return Attempt(**start, **{"exit_code": exit_codes.FAILED, **end}, root=RootFailure(**root))


_OF_ROOT, _OF_END = ({one.name for one in fields(kind)} for kind in (RootFailure, End))
_START_FIELDS = {one.name for one in fields(Attempt)} - _OF_END


def _note_odd_line(run: RunDir, text: str) -> None:
    if (run.attempts, text) not in _odd_lines:
        import logging  # late: the import takes each command 4 ms, and such a line is rare

        _odd_lines.add((run.attempts, text))
        log = logging.getLogger(__name__)
        log.warning(
            "%s has a line that does not record an attempt: %.80r. ddp-hpc skips this line and uses all others; nothing needs to be done.",
            run.attempts,
            text,
        )


def record_start(run: RunDir, *, attempt: int, job_id: str, first_step: int = 0, **of_job: Any) -> None:
    """Write into the ledger that this process begins an attempt; `of_job` are fields of `Attempt` that are known of its job.

    Raises:
        TypeError: where `of_job` has another name.
    """
    if unknown := of_job.keys() - _START_FIELDS:
        raise TypeError(f"an attempt has no {', '.join(sorted(unknown))}")
    start = {
        "attempt": attempt,
        "job_id": job_id,
        "host": host_name(),
        "pid": os.getpid(),
        "pid_start": start_ticks(os.getpid()),
        "started_at": time.time(),
        "first_step": first_step,
    }
    known = {key: value for key, value in of_job.items() if value not in (None, "")}
    append_json_line(run.attempts, {**start, **known})


def record_addition(run: RunDir, *, attempt: int, **known: object) -> None:
    """Write into the ledger what has become known of an attempt: the nodes it failed on, another end of its job."""
    append_json_line(run.attempts, {"attempt": attempt, **known})


def record_end(run: RunDir, attempt: int, end: End) -> None:
    """Write into the ledger how an attempt ended."""
    append_json_line(run.attempts, {"attempt": attempt, **end.as_record, "ended_at": time.time()})
