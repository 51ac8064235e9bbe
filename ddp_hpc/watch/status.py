"""The status of a run, from its directory and, where that is not enough, from Slurm."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddp_hpc.base import processes
from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.base.patience import ask_once
from ddp_hpc.cluster.slurm import states
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Attempt, Ending, Ledger, Next
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.poll_files import ReadCache
from ddp_hpc.run.run_dir.records import AwaitedRun, Progress, QueuedJob, read_awaited, read_progress, read_queued_job
from ddp_hpc.run.run_dir.timeline import SlowRankAlarm, read_alarms
from ddp_hpc.watch.awaited import awaited_text, why_never_started
from ddp_hpc.watch.failed_worker_log import last_words

if TYPE_CHECKING:
    from ddp_hpc.watch.queue import AskSlurm, QueueStatus

State = Literal[
    "prepared", "waiting", "starting", "running", "stopping", "interrupted", "unknown",
    "finished", "stopped", "failed", "refused", "cancelled", "fenced",
]  # fmt: skip
"""`prepared`: the job script is rendered, for the user's sbatch. `waiting`: in Slurm's queue. `starting`: no step yet.
`stopping`: asked to stop. `interrupted`: killed before it recorded an end. `unknown`: on another host, and nothing written
for `SILENCE_S`. Else how the newest attempt ended."""

ALIVE = frozenset({"waiting", "starting", "running", "stopping"})
_KILLED = frozenset({"waiting", "interrupted", "unknown", "cancelled"})
"""States of a run whose processes may have been killed at any moment."""
SILENCE_S = 120.0
"""A run on another host that has written nothing for longer may have died."""
SLURM_SILENCE_S = 20.0
"""Slurm is asked about a job that has written nothing for longer."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The content of the run directory at one moment."""

    attempts: Sequence[Attempt]
    progress: Progress | None
    committed: Sequence[int]
    """Steps with a checkpoint, newest last."""
    is_held: bool | None
    """Whether a process on this host holds the run's lock; None if the file system has no locks."""
    wants_stop: bool
    is_done: bool
    is_rendered: bool = False
    """Whether the job script exists."""
    host: str
    """This host."""
    now: float
    queued: QueuedJob | None = None
    """The newest job that was submitted."""
    queue_status: QueueStatus | None = None
    """What Slurm says about that job; None if it was not asked."""
    waits_for: str = ""
    """The runs that the newest job waits for, while it has not begun, as a sentence."""
    slow_ranks: Sequence[SlowRankAlarm] = ()
    """The run's history of ranks that the others had to wait for."""
    never_started: str = ""
    """Why that job can never start: one of these runs has ended in another way than it had to."""
    last_words: str = ""
    """The end of the console, where the job has ended and has written no record."""

    @property
    def has_begun(self) -> bool:
        """Whether the newest job has started an attempt; true if there is no job."""
        last = self.attempts[-1] if self.attempts else None
        return self.queued is None or (last is not None and last.attempt >= self.queued.attempt)

    @property
    def continuation(self) -> str:
        last = self.committed[-1] if self.committed else None
        return continuation_text(last, self.progress.saves if self.progress else None)

    @property
    def silent_s(self) -> float | None:
        """Seconds since the run last wrote something."""
        times = [time for attempt in self.attempts for time in (attempt.started_at, attempt.ended_at) if time]
        times += [self.progress.at] if self.progress else []
        return max(0.0, self.now - max(times)) if times else None


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run; the fields are the keys of `status --json`."""

    run: str
    path: str
    state: State
    reason: str
    attempt: int | None
    job_id: str | None
    host: str | None
    step: int
    total_steps: int | None
    saves: int | None
    """How many looks have found that a script has saved its state (`script.progress`), so at least so many saves; None for a
    training by a recipe, which has steps."""
    epoch: int | None
    epochs: int | None
    loss: float | None
    samples_per_s: float | None
    eta_s: float | None
    """Seconds to the last step, while the run is alive."""
    limit_s: float | None
    """Seconds to the end of the job's time limit, while the run is alive."""
    slurm_state: str | None
    """As Slurm writes it, if it was asked: about a pending job, or one that has written nothing for a while."""
    starts_at: float | None
    """When Slurm expects a pending job to start, in seconds since the epoch."""
    metrics: Mapping[str, float]
    """Metrics of the newest evaluation."""
    last_checkpoint: int | None
    """Step of the newest committed checkpoint, from which the run resumes."""
    checkpoint_age_s: float | None
    save_error: str | None
    slow_ranks: Sequence[SlowRankAlarm]
    """The ranks that the others wait for now, while the run is alive."""
    source: str
    """Where the state comes from: the run directory, or a command of Slurm."""
    age_s: float | None
    """Age of the newest information that was read."""
    entity: str = ""
    """The sample or file that the failure of the newest attempt concerns, where a worker reported one."""
    fingerprint: str = ""
    """Of that failure: equal where two attempts failed in the same way."""
    why_last: str = ""
    """Why no attempt follows, where one might be expected."""
    tokens_per_s: float | None = None
    """None where the recipe does not say how many tokens a sample has."""
    save_bytes: Mapping[str, int] = field(default_factory=dict)
    """How much a save takes of the memory of rank zero's `host`, and of its `gpu` while it is copied."""
    mended: str = ""
    """The newest failure after which ddp-hpc started another attempt, and how many came before it."""

    @property
    def is_alive(self) -> bool:
        return self.state in ALIVE


def read_status(run: RunDir, *, now: float, ask: AskSlurm | None = None, files: ReadCache | None = None) -> RunStatus:
    """Return the status of a run; `ask` asks Slurm about a job that is pending or has written nothing for a while.

    A caller that polls passes the same `files` each time, so that unchanged files are not read again.
    """
    seen = observe(run, now=now, host=processes.host_name(), files=files or ReadCache())
    if ask is not None and seen.queued is not None and _needs_slurm(seen):
        job_id, sent_at = seen.queued.job_id, seen.queued.at
        seen = replace(seen, queue_status=ask(job_id, sent_at))
        if not seen.has_begun:
            awaited: list[AwaitedRun] = ask_once(run.awaited, lambda: read_awaited(run, job_id), unknown=[])
            why = ask_once(run.awaited, lambda: why_never_started(awaited), unknown="")
            is_over = seen.queue_status is not None and seen.queue_status.has_ended
            words = last_words(run, sent_at) if is_over else ""
            seen = replace(seen, waits_for=awaited_text(awaited), never_started=why, last_words=words)
    if files is None and _state(seen) in _KILLED:  # of a script that ended, its watcher has listed the files
        seen = replace(seen, progress=_with_newest_saves(run, seen.progress))
    return status_of(run, seen)


def _with_newest_saves(run: RunDir, progress: Progress | None) -> Progress | None:
    """Return a script's progress with its saves since its watcher last listed its files; of one that was killed, nothing lists them again."""
    if progress is None or progress.saves is None:
        return progress
    from ddp_hpc.run.workload.script_progress import look, read_seen_files  # late: only a script needs it

    try:
        recorded = read_seen_files(run)
        now = look(recorded, recorded.pattern, Path("/")) if recorded.pattern else recorded
    except (OSError, UnreadableError):
        return progress
    saved_at = max(filter(None, (progress.last_checkpoint_at, now.newest_at)), default=None)
    return replace(progress, saves=max(progress.saves, now.num_changes), last_checkpoint_at=saved_at)


def _needs_slurm(seen: Observation) -> bool:
    """Tell whether the run directory alone does not give the state of the job."""
    if not seen.has_begun:
        return seen.queued is not None and seen.queued.cancelled_at is None
    last = seen.attempts[-1]
    is_silent = seen.silent_s is not None and seen.silent_s > SLURM_SILENCE_S
    return last.cluster == "slurm" and last.ending is None and is_silent and not seen.is_held


def observe(run: RunDir, *, now: float, host: str, files: ReadCache) -> Observation:
    """Read the run directory once."""
    # The ledger is read before and after the lock is tried. A run may write the end of an attempt and release its lock in
    # between; only an attempt without an end in both reads, whose lock was free, has died.
    before = files.read(run.attempts, lambda: Ledger.read(run))
    is_held = is_held_here(run, before.newest, host)
    after = files.read(run.attempts, lambda: Ledger.read(run))
    attempts = list(after.attempts)
    while len(attempts) > 1 and attempts[-1].ending == Ending.REFUSED and attempts[-1].cluster == "local":
        attempts.pop()  # a command refused to go on with the run, and left it as it was
    return Observation(
        attempts=attempts,
        progress=files.read(run.progress, lambda: read_progress(run)),
        committed=files.read(run.checkpoints, lambda: committed_steps(run)),
        is_held=True if len(after.attempts) > len(before.attempts) else is_held,
        wants_stop=ask_once(run.stop_request, run.stop_request.exists, unknown=False),
        is_done=ask_once(run.done, run.done.exists, unknown=False),
        is_rendered=ask_once(run.job_script, run.job_script.exists, unknown=False),
        host=host,
        now=now,
        queued=files.read(run.submission, lambda: read_queued_job(run)),
        slow_ranks=ask_once(run.slow_ranks, lambda: files.read(run.slow_ranks, lambda: read_alarms(run)), unknown=()),
    )


def is_held_here(run: RunDir, newest: Attempt | None, host: str) -> bool | None:
    """Return whether a process of this host works on the run; None if that cannot be found out."""
    # To try a lock means to hold it for a moment, in which another user, the run's owner, could not start it. So only the
    # owner tries it.
    try:
        if _is_ours(run.lock):
            return processes.is_locked(run.lock)
    except FileNotFoundError:
        return False
    except OSError:  # a file system without locks
        return None
    # Look for the process of another user's run. /proc may hide it (`hidepid`,
    # https://man7.org/linux/man-pages/man5/proc.5.html), so a process that is not found may be alive.
    return True if newest is not None and newest.is_alive_on(host) else None


def _is_ours(path: Path) -> bool:
    """Tell whether a file that only its owner may write belongs to this user."""
    # A file server may map owners (NFS with `all_squash` or idmap, SMB): then the uid differs from ours although the file
    # is ours, but write permission shows it (https://man7.org/linux/man-pages/man5/exports.5.html).
    # Root may write all files, so there it shows nothing.
    if path.stat().st_uid == os.geteuid():
        return True
    return os.geteuid() != 0 and os.access(path, os.W_OK, effective_ids=True)


def status_of(run: RunDir, seen: Observation) -> RunStatus:
    """Return the status that follows from an observation."""
    state = _state(seen)
    last = seen.attempts[-1] if seen.attempts else None
    progress = seen.progress or Progress(attempt=0)
    saved_at = progress.last_checkpoint_at
    source, age_s = _source(seen)
    asked, is_running = seen.queue_status, state in {"running", "stopping"}
    has_start = state == "waiting" and asked and not (states.is_held(asked.reason) or states.why_never(asked.reason))
    of_progress: dict[str, Any] = {name: getattr(progress, name) for name in _PROGRESS_FIELDS}
    begun = last if seen.has_begun else None
    return RunStatus(
        **of_progress,
        run=run.name,
        path=str(run.path),
        state=state,
        reason=_reason(state, seen),
        attempt=last.attempt if last else None,
        job_id=seen.queued.job_id if seen.queued and not seen.has_begun else last.job_id if last else None,
        host=last.host if last else None,
        eta_s=progress.eta_s if is_running else None,
        limit_s=last.ends_at - seen.now if last and last.ends_at and is_running else None,
        slurm_state=asked.state if asked else None,
        starts_at=asked.starts_at if asked and has_start else None,
        last_checkpoint=seen.committed[-1] if seen.committed else None,
        checkpoint_age_s=max(0.0, seen.now - saved_at) if saved_at else None,
        slow_ranks=[
            one
            for one in seen.slow_ranks
            if last and is_running and one.attempt == last.attempt and one.ended_at is None
        ],
        source=source,
        age_s=age_s,
        entity=begun.root.entity if begun else "",
        fingerprint=begun.root.fingerprint if begun else "",
        why_last=begun.why_last if begun else "",
        mended=_newest_survived_failure(seen.attempts),
    )


_PROGRESS_FIELDS = (
    "step", "total_steps", "saves", "epoch", "epochs", "loss", "samples_per_s", "tokens_per_s", "save_bytes", "metrics",
    "save_error",
)  # fmt: skip
"""Fields that are the same in both."""


def _newest_survived_failure(attempts: Sequence[Attempt]) -> str:
    """Return the newest failure after which ddp-hpc started another attempt, in one line; empty without one."""
    failed = [one for one in attempts[:-1] if one.ending == Ending.FAILED and one.next]
    if not failed:
        return ""
    newest, earlier = failed[-1], f"; failures before it: {len(failed) - 1}" if len(failed) > 1 else ""
    reason = next(iter(newest.reason.splitlines()), "") or newest.cause
    return f"attempt {newest.attempt} failed, and ddp-hpc started the next one: {reason}{earlier}"


def _source(seen: Observation) -> tuple[str, float | None]:
    """Return where the state comes from, and how old that information is."""
    asked = seen.queue_status
    if asked is None or not asked.at:
        return "run directory" if asked is None else f"run directory; {asked.problem}", seen.silent_s
    return f"{asked.source}; since then: {asked.problem}" if asked.problem else asked.source, seen.now - asked.at


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
"""Slurm's state of a job -> the state of the run, if the job has written nothing itself."""


def _state(seen: Observation) -> State:
    last = seen.attempts[-1] if seen.attempts else None
    if seen.queue_status is not None and (not seen.has_begun or seen.queue_status.state is not None):
        return _state_by_slurm(seen, seen.queue_status)
    if not seen.has_begun:
        return "cancelled" if seen.queued is not None and seen.queued.cancelled_at else "waiting"
    if last is None and seen.is_rendered and not seen.is_held:
        return "prepared"
    is_alive = _is_alive(seen, last)
    if last is not None and last.ending is not None:
        # Where the supervisor has died, nobody starts the next attempt.
        then: State = "waiting" if last.next else last.ending.value
        if last.next == Next.IN_PLACE:
            then = "interrupted" if is_alive is False else "starting"
        return then
    if not is_alive:
        return "finished" if seen.is_done else "interrupted" if is_alive is False else "unknown"
    return "stopping" if seen.wants_stop else _state_of_alive(seen)


def _state_of_alive(seen: Observation) -> State:
    has_stepped = seen.progress is not None and seen.attempts and seen.progress.attempt == seen.attempts[-1].attempt
    return "running" if has_stepped else "starting"


def _state_by_slurm(seen: Observation, queue_status: QueueStatus) -> State:
    """Return the state of a job that has written nothing, or nothing for a while, by what Slurm says about it."""
    if queue_status.state is None:
        return "waiting" if queue_status.problem else "cancelled" if seen.never_started else "unknown"
    state = _BY_SLURM[states.parse_state(queue_status.state)]
    if not seen.has_begun:
        return state
    if seen.is_done and queue_status.has_ended:
        return "finished"
    if state == "starting":
        return "stopping" if seen.wants_stop else _state_of_alive(seen)
    return state


def _is_alive(seen: Observation, last: Attempt | None) -> bool | None:
    """Return whether the newest attempt is alive; None if it runs on another host and has written nothing for long."""
    if (last is None or last.host == seen.host) and seen.is_held is not None:
        return seen.is_held
    return True if seen.silent_s is not None and seen.silent_s <= SILENCE_S else None


def _reason(state: State, seen: Observation) -> str:
    by_slurm = "" if seen.queue_status is None else _reason_by_awaited(state, seen, seen.queue_status)
    if by_slurm:
        return by_slurm
    if state == "prepared":
        return "its job script is rendered, but no job of it has started yet: submit the script with `sbatch`"
    if state == "cancelled" and not seen.has_begun:
        return "cancelled by the user while it waited"
    if state == "interrupted":
        return f"its processes are gone: they were killed, or the machine went down. Submit the run again: it {seen.continuation}"
    if state == "unknown":
        host = seen.attempts[-1].host if seen.attempts else "its host"
        return (
            f"it ran on {host} and has written nothing for more than {SILENCE_S:.0f} s, so this host cannot tell whether it "
            f"still runs: call `ddp-hpc status` on {host}, or submit the run again there"
        )
    return seen.attempts[-1].reason if seen.attempts and seen.has_begun else ""


def _reason_by_awaited(state: State, seen: Observation, queue_status: QueueStatus) -> str:
    """Return which run a job waits for, or why it never started; else what Slurm says."""
    if state == "cancelled" and seen.never_started:
        return f"cancelled, because {seen.never_started}"
    if queue_status.is_waiting and seen.never_started:
        return f"{seen.never_started}, so the job will not start; cancel it, and submit again"
    if queue_status.is_waiting and seen.waits_for and queue_status.reason.strip("()") == "Dependency":
        return seen.waits_for
    return _reason_by_slurm(state, seen, queue_status)


def _reason_by_slurm(state: State, seen: Observation, queue_status: QueueStatus) -> str:
    """Return why a job is pending; or what Slurm says about a job that has written nothing."""
    if queue_status.is_waiting:
        is_short_of_nodes = queue_status.reason.strip("(").startswith("ReqNodeNotAvail")
        excludes = f"; the job excludes nodes on which the run failed; to allow those that it needs: `ddp-hpc requeue {queue_status.job_id} --now`"
        has_excluded = is_short_of_nodes and any(attempt.failed_nodes for attempt in seen.attempts)
        return states.explain_reason(queue_status.reason) + (excludes if has_excluded else "")
    if queue_status.state is None:
        is_gone = not queue_status.problem and not seen.has_begun
        gone = f"Slurm has no job {queue_status.job_id} any more, and the job wrote nothing to the run directory: submit again"
        return gone if is_gone else ""
    phrase = states.state_as_verb(queue_status.state)
    if queue_status.has_ended and not seen.has_begun:
        said = f"before ddp-hpc began in it: {seen.last_words}"
        nothing = "and wrote nothing to the run directory: check that its nodes can write there, and submit again"
        return f"job {queue_status.job_id} {phrase} {said if seen.last_words else nothing}"
    if queue_status.has_ended:
        leads = {"failed": "; see its log (`ddp-hpc logs`). ", "interrupted": ". "}
        again = f"Submit the run again: it {seen.continuation}"
        return f"job {queue_status.job_id} {phrase}{leads[state] + again if state in leads else ''}"
    if state == "running" and seen.silent_s is not None:
        return f"the run has written nothing for {seen.silent_s:.0f} s, but Slurm says that its job {phrase}; if this lasts, read its log (`ddp-hpc logs`)"
    return ""


def effect_of_resubmitting(run: RunDir) -> str:
    """Return what a run does when it is submitted again, by the checkpoints that it has now."""
    try:
        progress, steps = _with_newest_saves(run, read_progress(run)), committed_steps(run)
        return f"it {continuation_text(steps[-1] if steps else None, progress.saves if progress else None)}"
    except (OSError, UnreadableError):
        return f"{run.checkpoints} cannot be read now, so from which step it goes on is not known"


def stop_text(run: RunDir, *, then: Literal["end", "requeue"] = "end") -> str:
    """Say that a run was asked to stop, and what it does when it is started again."""
    progress = read_progress(run)
    trains_by_recipe = progress is not None and progress.saves is None
    again = "it continues from the checkpoint that it writes now" if trains_by_recipe else effect_of_resubmitting(run)
    to_do, how = ("stop", "Submit it again") if then == "end" else ("go back to the queue", "When its job starts again")
    return f"{run.name} was asked to {to_do}. {how}: {again}."


def continuation_text(last_checkpoint: int | None, saves: int | None) -> str:
    """Return what a run does when it is submitted again, by two fields of its status."""
    if last_checkpoint is not None:
        return f"continues from step {last_checkpoint}"
    if saves is None:
        return "has no checkpoint, so it starts from the beginning"
    seen = "with what it has saved" if saves else "and no file that `script.progress` names shows a save of this run"
    return f"starts the script again, {seen}"
