"""Where a run stands, told from its directory alone."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_hpc import processes
from ddp_hpc.records import Attempt, Ending, Progress, read_attempts, read_progress
from ddp_hpc.run_dir import RunDir

State = Literal["starting", "running", "stopping", "interrupted", "unknown"] | Ending
"""Alive: begun without a step yet; stepping; asked to stop. Not alive: killed without a last word. `unknown`: on
another host, and silent for long. Or how the newest attempt ended."""

ALIVE = frozenset({"starting", "running", "stopping"})
SILENCE_S = 120.0
"""A run on another host that has written nothing for longer may be dead."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What the run directory showed at one moment."""

    attempts: Sequence[Attempt]
    progress: Progress | None
    committed: Sequence[int]
    """Steps with a checkpoint, newest last."""
    is_held: bool | None
    """Whether a process on this host works on the run; None where the file system cannot tell."""
    wants_stop: bool
    is_done: bool
    host: str
    """This host."""
    now: float


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """Where a run stands; the fields are the keys of `status --json`."""

    run: str
    path: str
    state: State
    reason: str
    attempt: int | None
    job_id: str | None
    host: str | None
    step: int
    total_steps: int | None
    epoch: int | None
    epochs: int | None
    loss: float | None
    samples_per_s: float | None
    eta_s: float | None
    """Seconds to the last step; only of a run that is alive."""
    metrics: Mapping[str, float]
    """The newest evaluation's numbers."""
    last_checkpoint: int | None
    """Step of the newest committed checkpoint: where a resume begins."""
    save_error: str | None
    source: str
    """Who told: the run directory."""
    age_s: float | None
    """Seconds since the newest of what was read was written."""

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def read_status(run: RunDir, *, now: float, host: str | None = None) -> RunStatus:
    """Read where a run stands."""
    return status_of(run, observe(run, now=now, host=host or socket.gethostname()))


def observe(run: RunDir, *, now: float, host: str) -> Observation:
    """Look at the run directory once.

    The ledger is read before and after the lock is tried: an attempt that neither look saw end, and that nobody holds
    in between, is dead.
    """
    from ddp_hpc import checkpoint_store  # late: a checksum library, which a plain import of this module need not load

    before = read_attempts(run)
    is_held = is_held_here(run)
    after = read_attempts(run)
    return Observation(
        attempts=after,
        progress=read_progress(run),
        committed=checkpoint_store.committed_steps(run),
        is_held=True if len(after) > len(before) else is_held,
        wants_stop=run.stop_request.exists(),
        is_done=run.done.exists(),
        host=host,
        now=now,
    )


def is_held_here(run: RunDir) -> bool | None:
    """Return whether a process of this host works on the run; None where that cannot be told."""
    try:
        return processes.is_locked(run.lock)
    except OSError:  # a file system without locks, or another user's run
        return None


def status_of(run: RunDir, seen: Observation) -> RunStatus:
    """Tell the status from what was seen."""
    state = _state(seen)
    last = seen.attempts[-1] if seen.attempts else None
    progress = seen.progress
    written_at = _written_at(seen)
    return RunStatus(
        run=run.name,
        path=str(run.path),
        state=state,
        reason=_reason(state, seen),
        attempt=last.attempt if last else None,
        job_id=last.job_id if last else None,
        host=last.host if last else None,
        step=progress.step if progress else 0,
        total_steps=progress.total_steps if progress else None,
        epoch=progress.epoch if progress else None,
        epochs=progress.epochs if progress else None,
        loss=progress.loss if progress else None,
        samples_per_s=progress.samples_per_s if progress else None,
        eta_s=progress.eta_s if progress and state in {"running", "stopping"} else None,
        metrics=progress.metrics if progress else {},
        last_checkpoint=seen.committed[-1] if seen.committed else None,
        save_error=progress.save_error if progress else None,
        source="run directory",
        age_s=None if written_at is None else max(0.0, seen.now - written_at),
    )


def _state(seen: Observation) -> State:
    last = seen.attempts[-1] if seen.attempts else None
    if last is not None and last.ending is not None:
        return last.ending
    is_alive = _is_alive(seen, last)
    if not is_alive:
        return "finished" if seen.is_done else "interrupted" if is_alive is False else "unknown"
    if seen.wants_stop:
        return "stopping"
    has_stepped = seen.progress is not None and last is not None and seen.progress.attempt == last.attempt
    return "running" if has_stepped else "starting"


def _is_alive(seen: Observation, last: Attempt | None) -> bool | None:
    """Return whether the newest attempt is alive; None where its silence may also be another host's slow disk."""
    if (last is None or last.host == seen.host) and seen.is_held is not None:
        return seen.is_held
    written_at = _written_at(seen)
    return True if written_at is not None and seen.now - written_at <= SILENCE_S else None


def _written_at(seen: Observation) -> float | None:
    times = [time for attempt in seen.attempts for time in (attempt.started_at, attempt.ended_at) if time]
    if seen.progress:
        times.append(seen.progress.at)
    return max(times, default=None)


def _reason(state: State, seen: Observation) -> str:
    if state == "interrupted":
        resume = f"from step {seen.committed[-1]}" if seen.committed else "from the beginning"
        return f"killed, or its machine went down; submit again to go on {resume}"
    if state == "unknown":
        host = seen.attempts[-1].host if seen.attempts else "its host"
        return (
            f"it ran on {host} and has been silent for more than {SILENCE_S:.0f} s; look there, or submit again there"
        )
    return seen.attempts[-1].reason if seen.attempts else ""
