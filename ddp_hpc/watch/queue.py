"""Asks Slurm about jobs, as seldom as possible.

Slurm is asked only about jobs that are pending or have written nothing for a while; a running job is read from its run
directory. All processes of a user on a host share one answer of squeue, in a cache file. A squeue by many users at once
slows down the controller: https://slurm.schedmd.com/squeue.html#SECTION_PERFORMANCE.
"""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddp_hpc.base.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.base.processes import host_name
from ddp_hpc.base.record import read_record, write_record
from ddp_hpc.cluster.slurm import states

FRESH_S = 30.0
"""An older answer is not used."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""If Slurm does not answer, how long to wait before asking again; doubled each time, up to the second number."""
UNKNOWN_S = 600.0
"""How long not to ask again about a job that Slurm does not know."""


@dataclass(frozen=True, kw_only=True)
class QueueStatus:
    """What Slurm says about one job, and when."""

    job_id: str
    state: str | None = None
    """As Slurm writes it (`PENDING`); None if Slurm knows no such job, or does not answer."""
    reason: str = ""
    starts_at: float | None = None
    """When Slurm expects a pending job to start."""
    at: float = 0.0
    source: str = "squeue"
    problem: str = ""
    """Why there is no newer answer."""

    @property
    def is_waiting(self) -> bool:
        return self.state is not None and states.parse_state(self.state) in {"pending", "requeued"}

    @property
    def has_ended(self) -> bool:
        return self.state is not None and states.has_ended(self.state)


@dataclass
class Queue:
    """What squeue listed of all jobs of the user, and when; the fields are the keys of the cache file."""

    at: float = 0.0
    jobs: dict[str, QueueStatus] = field(default_factory=dict)
    """By each name that a job has; `14_[4-9]` stands for the tasks of an array that wait."""
    ended: dict[str, QueueStatus] = field(default_factory=dict)
    """Jobs that squeue does not list any more; without a state, if Slurm does not know them at all."""
    pause_s: float = 0.0
    asked_at: float = 0.0
    problem: str = ""
    """Why there is no newer answer."""

    @classmethod
    def read(cls, path: Path) -> Queue:
        with suppress(OSError):
            return read_record(path, cls) or cls()
        return cls()

    def write(self, path: Path) -> None:
        with suppress(OSError):  # no home directory, or a full disk: go without the cache
            write_record(path, self, durable=False)

    def must_ask(self, now: float, submitted_at: float) -> bool:
        """Tell whether the cached answer is too old, or older than the job."""
        if now - self.asked_at < self.pause_s:
            return False
        return now - self.at >= FRESH_S or self.at < submitted_at

    def is_unknown(self, job_id: str, now: float) -> bool:
        """Tell whether Slurm said recently that it knows no such job."""
        ended = self.ended.get(job_id)
        return ended is not None and ended.state is None and now - ended.at < UNKNOWN_S

    def status(self, job_id: str) -> QueueStatus:
        found = self.jobs.get(job_id) or self.ended.get(job_id) or QueueStatus(job_id=job_id, at=self.at)
        return replace(found, problem=self.problem)


AskSlurm = Callable[[str, float], QueueStatus]
"""(job id, time of submission) -> what Slurm says about it."""


def asker(environ: Mapping[str, str], *, clock: Callable[[], float]) -> AskSlurm:
    """Return a function that asks Slurm about a job, through a cache of this user on this host."""
    cache = _cache_file(environ)

    def ask(job_id: str, submitted_at: float) -> QueueStatus:
        with _locked(cache):
            known = Queue.read(cache)
            if known.must_ask(clock(), submitted_at):
                known = queue_now(environ, clock(), known)
                known.write(cache)
            status = known.status(job_id)
            if status.state is None and not status.problem and not known.is_unknown(job_id, clock()):
                status = _ask_unlisted_job(job_id, environ, clock())
                if status.has_ended or (status.state is None and not status.problem):
                    known.ended[job_id] = status
                    known.write(cache)
        return status

    return ask


def queue_reader(environ: Mapping[str, str], *, clock: Callable[[], float]) -> Callable[[float], Queue]:
    """Return a function that returns the whole queue, through the same cache; its argument is the newest submission's time."""
    cache, last = _cache_file(environ), [Queue()]

    def read(submitted_at: float) -> Queue:
        if last[0].must_ask(clock(), submitted_at):  # as a file that cannot be written would have Slurm asked each time
            with _locked(cache):
                known = max(Queue.read(cache), last[0], key=lambda one: one.asked_at)
                if known.must_ask(clock(), submitted_at):
                    known = queue_now(environ, clock(), known)
                    known.write(cache)
            last[0] = known
        return last[0]

    return read


def _cache_file(environ: Mapping[str, str]) -> Path:
    home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/nonexistent')}/.cache"
    # A file for each host: hosts that share a home directory may belong to several clusters.
    return Path(home) / "ddp_hpc" / f"queue-{host_name()}.json"


def queue_now(environ: Mapping[str, str], now: float, known: Queue | None = None) -> Queue:
    """Return the whole queue as squeue lists it now; where it does not answer, what was known before."""
    known = known or Queue()
    from ddp_hpc.cluster.slurm import client  # imported here because only a question to Slurm needs it

    try:
        entries = client.queue(environ)
    except (SlurmUnavailableError, ConfigError) as error:
        pause_s = min(max(2 * known.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        return Queue(known.at, known.jobs, known.ended, pause_s, now, str(error))
    jobs = {
        name: QueueStatus(job_id=name, state=entry.state, reason=entry.reason, starts_at=entry.starts_at, at=now)
        for entry in entries
        for name in {entry.number, entry.job_id}  # a task of an array has two
    }
    return Queue(now, jobs, known.ended, 0.0, now)


def _ask_unlisted_job(job_id: str, environ: Mapping[str, str], now: float) -> QueueStatus:
    """Ask about a job that squeue does not list."""
    from ddp_hpc.cluster.slurm import client  # imported here because only a question to Slurm needs it

    # The controller keeps an ended job for `MinJobAge` seconds, the accounting database for longer:
    # https://slurm.schedmd.com/slurm.conf.html#OPT_MinJobAge
    try:
        record = client.job(job_id, environ)
    except (SlurmUnavailableError, ConfigError) as error:
        return QueueStatus(job_id=job_id, at=now, problem=str(error))
    if record is None:
        return QueueStatus(job_id=job_id, at=now)
    return QueueStatus(job_id=job_id, state=record.state, reason=record.reason, at=now, source="scontrol or sacct")


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Hold the lock of the cache, so that processes that ask at the same time share one answer of Slurm.

    Without a lock file, or locks, each of them asks.
    """
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        lock = cache.with_suffix(".lock").open("w", encoding="utf-8")
    except OSError:
        yield
        return
    with lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
