"""What Slurm says of jobs, asked seldom: one squeue a user at a time, kept in a file for all who look.

A running job is read from its run directory; Slurm is asked only for those that wait, or are silent.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ddp_hpc.durable import read_json, replace_text
from ddp_hpc.errors import ConfigError, SlurmUnavailableError
from ddp_hpc.slurm import states

FRESH_S = 30.0
"""An answer this old is asked for again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
"""After a question without an answer, the next waits: twice as long each time."""
UNKNOWN_S = 600.0
"""For so long, nobody asks again for a job that Slurm does not know."""


@dataclass(frozen=True, kw_only=True)
class JobWord:
    """What Slurm says of one job, and when it said so."""

    job_id: str
    state: str | None = None
    """In Slurm's word; None where it knows no such job, or did not answer."""
    reason: str = ""
    starts_at: float | None = None
    """While it waits, an estimate."""
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


Ask = Callable[[str, float], JobWord]
"""(job id, when it was submitted) -> what Slurm says of it."""


def asker(environ: Mapping[str, str], *, clock: Callable[[], float]) -> Ask:
    """Return a way to ask Slurm about jobs that all processes of this user on this host share."""
    home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '/nonexistent')}/.cache"
    cache = Path(home) / "ddp_hpc" / "queue.json"

    def ask(job_id: str, submitted_at: float) -> JobWord:
        with _alone(cache):
            known = _Known.read(cache)
            if known.must_ask(clock(), submitted_at):
                known = _asked(environ, known, clock())
                known.write(cache)
            word = known.word(job_id)
            if word.state is None and not word.problem and not known.is_unknown(job_id, clock()):
                word = _of_ended(job_id, environ, clock())
                if word.has_ended or (word.state is None and not word.problem):
                    known.ended[job_id] = word
                    known.write(cache)
        return word

    return ask


@dataclass
class _Known:
    """What the cache holds."""

    at: float
    jobs: dict[str, JobWord]
    ended: dict[str, JobWord]
    """Those that Slurm does not know by now, without a state, too."""
    pause_s: float = 0.0
    asked_at: float = 0.0
    problem: str = ""

    @classmethod
    def read(cls, path: Path) -> _Known:
        try:
            record = read_json(path) or {}
            words = {key: {job: JobWord(**word) for job, word in record[key].items()} for key in ("jobs", "ended")}
            return cls(
                record["at"], words["jobs"], words["ended"], record["pause_s"], record["asked_at"], record["problem"]
            )
        except (KeyError, TypeError, AttributeError, OSError):
            return cls(0.0, {}, {})

    def write(self, path: Path) -> None:
        try:
            replace_text(path, json.dumps(asdict(self)), durable=False)
        except OSError:  # no home, or a full one: ask each time
            return

    def must_ask(self, now: float, submitted_at: float) -> bool:
        """Tell whether the answer at hand is too old, or older than the job."""
        if now - self.asked_at < self.pause_s:
            return False
        return now - self.at >= FRESH_S or self.at < submitted_at

    def is_unknown(self, job_id: str, now: float) -> bool:
        """Tell whether Slurm said not long ago that it knows no such job."""
        ended = self.ended.get(job_id)
        return ended is not None and ended.state is None and now - ended.at < UNKNOWN_S

    def word(self, job_id: str) -> JobWord:
        found = self.jobs.get(job_id) or self.ended.get(job_id) or JobWord(job_id=job_id, at=self.at)
        return JobWord(**{**asdict(found), "problem": self.problem})


def _asked(environ: Mapping[str, str], known: _Known, now: float) -> _Known:
    """Ask squeue once for all of the user's jobs."""
    from ddp_hpc.slurm import client  # late: only who asks waits for it

    try:
        entries = client.queue(client.user_name(), environ)
    except (SlurmUnavailableError, ConfigError) as error:
        pause_s = min(max(2 * known.pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        return _Known(known.at, known.jobs, known.ended, pause_s, now, str(error))
    jobs = {
        entry.number: JobWord(
            job_id=entry.number, state=entry.state, reason=entry.reason, starts_at=entry.starts_at, at=now
        )
        for entry in entries
    }
    return _Known(now, jobs, known.ended, 0.0, now)


def _of_ended(job_id: str, environ: Mapping[str, str], now: float) -> JobWord:
    """Ask for a job that squeue does not list: the controller remembers it for minutes, the database for ever."""
    from ddp_hpc.slurm import client  # late: only who asks waits for it

    try:
        record = client.job(job_id, environ)
    except (SlurmUnavailableError, ConfigError) as error:
        return JobWord(job_id=job_id, at=now, problem=str(error))
    if record is None:
        return JobWord(job_id=job_id, at=now)
    return JobWord(job_id=job_id, state=record.state, reason=record.reason, at=now, source="scontrol or sacct")


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """Hold a lock, so that who looks at the same time shares the answer; go without where there is no place for it."""
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
