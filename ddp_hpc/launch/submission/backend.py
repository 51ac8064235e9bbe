"""Back ends, to which runs are submitted: their protocol, the table of them, and the choice of one for a run.

A back end is a module of this room that has the functions of `Backend`. To add one, write the module and add its line to
`BACKENDS`; `tests/contract` holds every back end to the same behaviour. Callers import no back end by name.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir.ledger import Attempt, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_queued_job

if TYPE_CHECKING:
    from ddp_hpc.launch.submission.request import SubmitRequest

AUTO = "auto"
"""Stands for the first back end of the table that this host can use."""


@dataclass(frozen=True)
class Submission:
    """The result of a submission."""

    run: RunDir
    backend: str
    """The name of the back end that holds the run; another than was asked for, where the run is there already."""
    state: Literal["started", "queued", "finished", "running", "waiting"]
    """Started now; queued now; or before: finished, running, waiting in the queue."""
    attempt: int
    """The attempt that it begins with, or that runs; counted from 0, -1 where none has begun."""
    is_new: bool = False
    """Whether the run did not exist before."""
    job_id: str | None = None
    """The scheduler's number of the job; None where there is no scheduler."""
    notes: tuple[str, ...] = ()
    """What the user should know about it, a line each."""


@dataclass(frozen=True, kw_only=True)
class SubmissionPlan:
    """What a submission would do."""

    notes: Sequence[str]
    """What the user should know about it, a line each."""
    command: Sequence[str]
    """What would be started on this machine, or in the job."""
    import_paths: Sequence[Path]
    """Where the run would import the user's code from."""
    script: str | None = None
    """The text that the scheduler would get; None where there is no scheduler."""


class Backend(Protocol):
    """Starts runs in one kind of place, and ends them. All functions of a back end may be called from any process.

    `environ` is the caller's environment, as is that of a request. Each function may raise ConfigError for what the user can change, and
    SlurmUnavailableError where a scheduler does not answer: that is never taken for a job that is gone.
    """

    @property
    def NAME(self) -> str:  # noqa: N802  a module's constant
        """The name in the table, after `--cluster` and in the run's records."""

    @property
    def HAS_QUEUE(self) -> bool:  # noqa: N802  a module's constant
        """Whether runs wait in a queue and go back into it; then partitions of a site profile count, too."""

    def is_here(self, environ: Mapping[str, str]) -> bool:
        """Return whether `auto` may choose this back end on this host, even if it does not answer now."""

    def describe(self, request: SubmitRequest) -> SubmissionPlan:
        """Return what `submit` would do; make nothing."""

    def prepare(self, request: SubmitRequest) -> list[str]:
        """Make the run directory with all that a start needs, and start nothing; return notes. Refused, a new run leaves nothing behind."""

    def submit(self, request: SubmitRequest) -> Submission:
        """Start the run or resume it; or say that it waits, runs or has finished, in whichever back end.

        Raises:
            WorkerError: where it failed before its first step, and the back end waits for that.
        """

    def wait(self, run: RunDir, attempt: int, environ: Mapping[str, str]) -> Attempt:
        """Return the last attempt, of those from `attempt` on, once it has ended and no other follows; change nothing.

        Raises:
            WorkerError: where the run is gone, and no record says how it ended.
        """

    def stop(self, run: RunDir, environ: Mapping[str, str], *, then: Literal["end", "requeue"] = "end") -> str:
        """Ask the run to commit a checkpoint and exit, for good or to be requeued; return a message for the user."""

    def cancel(self, run: RunDir, environ: Mapping[str, str]) -> str:
        """End the run without waiting for a checkpoint; return a message for the user.

        Where a scheduler sends a signal before it kills, ranks that agree on a step in time commit it all the same.
        """

    def hasten(self, run: RunDir, environ: Mapping[str, str]) -> bool:
        """Let a requeued job start sooner, where Slurm only delays it for having been requeued; return whether anything changed."""

    def find_job(self, run: RunDir, environ: Mapping[str, str]) -> Submission | None:
        """Return the run's start that waits or runs in this back end; None without one."""

    def why_in_use(self, run: RunDir, environ: Mapping[str, str]) -> str | None:
        """Return why the run's directory must not be moved: it waits, runs, or that cannot be known; None where it may.

        The caller holds the run's lock on this host.
        """


BACKENDS: dict[str, tuple[str, str | None]] = {
    "slurm": ("ddp_hpc.launch.submission.slurm", "sbatch"),
    "local": ("ddp_hpc.launch.submission.local", None),
}
"""Name -> its module, and a program that is on PATH wherever `auto` may choose it, in the order in which `auto` tries them.

A module is imported when it is used: it may import slowly. Without a program, `auto` may choose the back end everywhere.
"""


def load_backend(name: str) -> Backend:
    """Return a back end by its name."""
    if name not in BACKENDS:
        raise ConfigError(
            f"The cluster is {name!r}, but this version of ddp-hpc knows only {', '.join(sorted(BACKENDS))}. Name one of these with "
            "`--cluster`; a run that another version submitted needs that version."
        )
    return cast("Backend", import_module(BACKENDS[name][0]))


def choose_backend(asked: str, environ: Mapping[str, str]) -> Backend:
    """Return the back end that was asked for; for `auto`, the first that is here."""
    if asked != AUTO:
        backend = load_backend(asked)
        if command := BACKENDS[asked][1]:
            from ddp_hpc.cluster.slurm import client  # late: runs on one machine do not need it

            client.require(command, environ)
        return backend
    path = environ.get("PATH", "")
    on_path = (name for name, (_, command) in BACKENDS.items() if not command or shutil.which(command, path=path))
    return next(backend for backend in map(load_backend, on_path) if backend.is_here(environ))


def backend_of(run: RunDir) -> Backend:
    """Return the back end of the run's newest start, or of the job that waits, by the run's own records."""
    return load_backend(next(_recorded_backend_names(run), "local"))


def backends_of(run: RunDir) -> list[Backend]:
    """Return every back end that may still hold the run, by its records: a job may wait while a later attempt runs here."""
    return [load_backend(name) for name in dict.fromkeys(_recorded_backend_names(run))]


def find_job_elsewhere(run: RunDir, backend: str, environ: Mapping[str, str]) -> Submission | None:
    """Return the run's start that waits or runs in another back end than `backend`; None without one.

    It asks those that the run's records name, and those that any host has: they see processes that have recorded nothing
    yet. A back end that is not on this host is not asked.
    """
    everywhere = (name for name, (_, command) in BACKENDS.items() if command is None)
    names = dict.fromkeys([*_recorded_backend_names(run), *everywhere])
    for other in (load_backend(name) for name in names if name != backend):
        found = other.find_job(run, environ) if other.is_here(environ) else None
        if found is not None:
            return found
    return None


def _recorded_backend_names(run: RunDir) -> Iterator[str]:
    """Yield the back ends that the run's records name, that of the newest start first."""
    job, newest = read_queued_job(run), Ledger.read(run).newest
    of_job = [] if job is None else [str(job.backend)]  # a user may have edited the record
    if job is not None and (newest is None or newest.attempt < job.attempt):
        yield from of_job
    if newest is not None:
        yield newest.cluster
    yield from of_job
