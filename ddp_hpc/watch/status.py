"""Where a run stands, told from its directory alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ddp_hpc import processes
from ddp_hpc.ledger import Attempt, Ledger, Next
from ddp_hpc.patience import known
from ddp_hpc.records import Progress, QueuedJob, read_progress, read_queued_job
from ddp_hpc.rereading import LastRead
from ddp_hpc.run_dir import RunDir
from ddp_hpc.slurm import states
from ddp_hpc.watch.queue import Ask, JobWord

State = Literal[
    "prepared", "waiting", "starting", "running", "stopping", "interrupted", "unknown",
    "finished", "stopped", "failed", "refused", "cancelled", "fenced",
]  # fmt: skip
"""Not started yet: rendered, for plain sbatch. Alive: in Slurm's queue; begun without a step yet; stepping; asked to stop. Not alive: killed without a last word. `unknown`: on
another host, and silent for long. Or how the newest attempt ended."""

ALIVE = frozenset({"waiting", "starting", "running", "stopping"})
SILENCE_S = 120.0
"""A run on another host that has written nothing for longer may be dead."""
SLURM_SILENCE_S = 20.0
"""A job that has written nothing for longer is asked about."""


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
    is_rendered: bool = False
    """Whether a job script lies there."""
    host: str
    """This host."""
    now: float
    queued: QueuedJob | None = None
    """The newest job that was submitted."""
    word: JobWord | None = None
    """What Slurm says of it; None where it was not asked."""

    @property
    def has_begun(self) -> bool:
        """Whether the newest job has begun an attempt, if there is one."""
        last = self.attempts[-1] if self.attempts else None
        return self.queued is None or (last is not None and last.attempt >= self.queued.attempt)

    @property
    def silent_s(self) -> float | None:
        """How long nothing was written."""
        written_at = _written_at(self)
        return None if written_at is None else max(0.0, self.now - written_at)


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
    limit_s: float | None
    """Seconds to the end of the job's time limit; only of a run that is alive."""
    slurm_state: str | None
    """In Slurm's word, where it was asked: of a job that waits, is silent, or is gone."""
    starts_at: float | None
    """When Slurm believes that a waiting job starts, in seconds since the epoch."""
    metrics: Mapping[str, float]
    """The newest evaluation's numbers."""
    last_checkpoint: int | None
    """Step of the newest committed checkpoint: where a resume begins."""
    checkpoint_age_s: float | None
    save_error: str | None
    source: str
    """Who told: the run directory, or which command of Slurm's."""
    age_s: float | None
    """Seconds since the newest of what was read was written."""

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def read_status(
    run: RunDir, *, now: float, host: str | None = None, ask: Ask | None = None, files: LastRead | None = None
) -> RunStatus:
    """Read where a run stands; Slurm is asked, where `ask` can, of a job that waits or has been silent for a while.

    Whoever looks again and again hands in the same `files` each time: what has not changed is not read again.
    """
    seen = observe(run, now=now, host=host or socket.gethostname(), files=files or LastRead())
    if ask is not None and seen.queued is not None and _is_for_slurm(seen):
        seen = replace(seen, word=ask(seen.queued.job_id, seen.queued.at))
    return status_of(run, seen)


def _is_for_slurm(seen: Observation) -> bool:
    """Tell whether the run directory alone does not say how the job is."""
    if not seen.has_begun:
        return seen.queued is not None and seen.queued.cancelled_at is None
    last = seen.attempts[-1]
    is_silent = seen.silent_s is not None and seen.silent_s > SLURM_SILENCE_S
    return last.cluster == "slurm" and last.ending is None and is_silent and not seen.is_held


def observe(run: RunDir, *, now: float, host: str, files: LastRead) -> Observation:
    """Look at the run directory once.

    The ledger is read before and after the lock is tried: an attempt that neither look saw end, and that nobody holds
    in between, is dead.
    """
    from ddp_hpc import checkpoint_store  # late: a checksum library, which a plain import of this module need not load

    before = files.read(run.attempts, lambda: Ledger.read(run))
    is_held = is_held_here(run, before.newest, host)
    after = files.read(run.attempts, lambda: Ledger.read(run))
    return Observation(
        attempts=after.attempts,
        progress=files.read(run.progress, lambda: read_progress(run)),
        committed=files.read(run.checkpoints, lambda: checkpoint_store.committed_steps(run)),
        is_held=True if len(after.attempts) > len(before.attempts) else is_held,
        wants_stop=known(run.stop_request, run.stop_request.exists, unknown=False),
        is_done=known(run.done, run.done.exists, unknown=False),
        is_rendered=known(run.job_script, run.job_script.exists, unknown=False),
        host=host,
        now=now,
        queued=files.read(run.submission, lambda: read_queued_job(run)),
    )


def is_held_here(run: RunDir, newest: Attempt | None, host: str) -> bool | None:
    """Return whether a process of this host works on the run; None where that cannot be told."""
    try:
        if _is_ours(run.lock):
            return processes.is_locked(run.lock)
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks
        return None
    # Another user's run. Trying its lock would take it for a moment, in which that user could not start the run. And
    # /proc may hide that user's processes (`hidepid`, proc(5)), so one that is not seen may live all the same.
    return True if newest is not None and newest.lives(host) else None


def _is_ours(path: Path) -> bool:
    """Tell whether a file, which nobody but its owner may write, is this user's.

    Where a server maps owners (NFS with `all_squash` or another idmap, SMB), its number does not say so; being let in does.
    """
    if path.stat().st_uid == os.geteuid():
        return True
    return os.geteuid() != 0 and os.access(path, os.W_OK, effective_ids=True)  # root is let in everywhere


def status_of(run: RunDir, seen: Observation) -> RunStatus:
    """Tell the status from what was seen."""
    state = _state(seen)
    last = seen.attempts[-1] if seen.attempts else None
    progress = seen.progress
    saved_at = progress.last_checkpoint_at if progress else None
    source, age_s = _source(seen)
    return RunStatus(
        run=run.name,
        path=str(run.path),
        state=state,
        reason=_reason(state, seen),
        attempt=last.attempt if last else None,
        job_id=seen.queued.job_id if seen.queued and not seen.has_begun else last.job_id if last else None,
        host=last.host if last else None,
        step=progress.step if progress else 0,
        total_steps=progress.total_steps if progress else None,
        epoch=progress.epoch if progress else None,
        epochs=progress.epochs if progress else None,
        loss=progress.loss if progress else None,
        samples_per_s=progress.samples_per_s if progress else None,
        eta_s=progress.eta_s if progress and state in {"running", "stopping"} else None,
        limit_s=last.ends_at - seen.now if last and last.ends_at and state in {"running", "stopping"} else None,
        slurm_state=seen.word.state if seen.word else None,
        starts_at=seen.word.starts_at if seen.word and state == "waiting" else None,
        metrics=progress.metrics if progress else {},
        last_checkpoint=seen.committed[-1] if seen.committed else None,
        checkpoint_age_s=seen.now - saved_at if saved_at else None,
        save_error=progress.save_error if progress else None,
        source=source,
        age_s=age_s,
    )


def _source(seen: Observation) -> tuple[str, float | None]:
    """Return who told what counts most here, and how old it is."""
    word = seen.word
    if word is None:
        return "run directory", seen.silent_s
    if not word.at:
        return f"run directory; {word.problem}", seen.silent_s
    return (f"{word.source}; since then: {word.problem}" if word.problem else word.source), seen.now - word.at


_BY_SLURM: Mapping[states.JobState, State] = {
    "pending": "waiting",
    "requeued": "waiting",
    "running": "starting",
    "suspended": "running",
    "ending": "stopping",
    "completed": "failed",
    "failed": "failed",
    "cancelled": "cancelled",
    "preempted": "interrupted",
    "timeout": "interrupted",
    "node_fail": "interrupted",
    "out_of_memory": "failed",
    "unknown": "unknown",
}
"""Slurm's state of a job -> ours of a run, where the job itself has written nothing about it."""


_ON_THE_WAY: Mapping[Next, State] = {
    Next.IN_PLACE: "starting",
    Next.REQUEUE: "waiting",
    Next.SUCCESSOR: "waiting",
    Next.SLURM: "waiting",
}
"""What follows an attempt that has ended -> how the run is until the next one begins."""


def _state(seen: Observation) -> State:
    last = seen.attempts[-1] if seen.attempts else None
    if seen.word is not None and (not seen.has_begun or seen.word.state is not None):
        return _state_by_slurm(seen, seen.word)
    if not seen.has_begun:
        return "cancelled" if seen.queued is not None and seen.queued.cancelled_at else "waiting"
    if last is None and seen.is_rendered and not seen.is_held:
        return "prepared"
    is_alive = _is_alive(seen, last)
    if last is not None and last.ending is not None:
        is_dead = last.next == Next.IN_PLACE and is_alive is False  # whoever was to begin the next attempt is gone
        return "interrupted" if is_dead else _ON_THE_WAY.get(last.next, last.ending.value)
    if not is_alive:
        return "finished" if seen.is_done else "interrupted" if is_alive is False else "unknown"
    return "stopping" if seen.wants_stop else _state_of_living(seen)


def _state_of_living(seen: Observation) -> State:
    has_stepped = seen.progress is not None and seen.attempts and seen.progress.attempt == seen.attempts[-1].attempt
    return "running" if has_stepped else "starting"


def _state_by_slurm(seen: Observation, word: JobWord) -> State:
    """Return how a job is that has written nothing, or nothing for long, by what Slurm says of it."""
    if word.state is None:
        return "waiting" if word.problem else "unknown"
    told = _BY_SLURM[states.parse_state(word.state)]
    if not seen.has_begun:
        return told
    if seen.is_done and word.has_ended:
        return "finished"
    if told == "starting":
        return "stopping" if seen.wants_stop else _state_of_living(seen)
    return told


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
    told = "" if seen.word is None else _reason_by_slurm(state, seen, seen.word)
    if told:
        return told
    if state == "prepared":
        return "its job script was rendered, and no job of it has begun: start it with `sbatch`"
    if state == "cancelled" and not seen.has_begun:
        return "cancelled by the user while it waited"
    if state == "interrupted":
        resume = f"from step {seen.committed[-1]}" if seen.committed else "from the beginning"
        return f"killed, or its machine went down; submit again to go on {resume}"
    if state == "unknown":
        host = seen.attempts[-1].host if seen.attempts else "its host"
        return (
            f"it ran on {host} and has been silent for more than {SILENCE_S:.0f} s; look there, or submit again there"
        )
    return seen.attempts[-1].reason if seen.attempts and seen.has_begun else ""


def _reason_by_slurm(state: State, seen: Observation, word: JobWord) -> str:
    """Return why a job waits, in words; or, of one that wrote nothing, what Slurm says of it."""
    if word.is_waiting:
        return states.explain_reason(word.reason) + _way_out(seen, word)
    if word.state is None:
        return (
            "" if word.problem or seen.has_begun else f"Slurm knows no job {word.job_id} any more, and it wrote nothing"
        )
    if word.has_ended and not seen.has_begun:
        return (
            f"job {word.job_id} {states.phrase(word.state)}, and wrote nothing: do its nodes see the run's directory?"
        )
    if word.has_ended:
        return f"job {word.job_id} {states.phrase(word.state)}"
    if state == "running" and seen.silent_s is not None:
        return f"silent for {seen.silent_s:.0f} s, though Slurm says that it {states.phrase(word.state)}"
    return ""


def _way_out(seen: Observation, word: JobWord) -> str:
    """Return what the user may do about a job that waits for nodes that are gone while it leaves out others."""
    is_short_of_nodes = word.reason.strip("(").startswith("ReqNodeNotAvail")
    if not is_short_of_nodes or not any(attempt.failed_nodes for attempt in seen.attempts):
        return ""
    return f"; of the nodes it leaves out, having failed there, `ddp-hpc requeue {word.job_id} --now` lets in those it needs"
