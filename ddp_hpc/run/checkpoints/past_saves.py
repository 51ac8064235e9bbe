"""What the records of a run's earlier attempts say of its failures and saves. Pure, but for `read_past_saves`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Literal

from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Mark, read_marks

NUM_NEWEST_FAILURES = 8
"""So many failures count, and the training since the oldest of them: what a run did before says little of it now."""
_NUM_NEWEST_SAVES = 5

_SUDDEN_BY_CAUSE: Mapping[Cause, Literal["yes", "no", "if steps are lost"]] = {
    Cause.WORKER_CRASHED: "yes",
    Cause.HANG: "yes",
    Cause.NODE_FAILED: "yes",
    Cause.RANKS_DIFFER: "yes",
    Cause.UNEXPLAINED: "yes",
    Cause.SUPERVISOR_DIED: "yes",
    Cause.SUSPENDED: "yes",
    Cause.FENCED: "yes",
    Cause.PREEMPTED: "if steps are lost",
    Cause.TIME_LIMIT: "if steps are lost",
    Cause.STOP_ASKED: "if steps are lost",
    Cause.REQUEUE_ASKED: "if steps are lost",
    Cause.SCRIPT_ASKED: "no",
    Cause.FINISHED: "no",
    Cause.REFUSED: "no",
    Cause.CANCELLED: "no",
    Cause.DIVERGED: "no",
    Cause.NOT_SAVED: "no",
    Cause.PREFLIGHT: "no",
}
"""Whether an attempt that ended so counts as a failure that more saves would have made cheaper. An attempt that is asked to stop saves, unless it
had no time to. A user who cancels knows what is lost; the next attempt after NaN is not the same training."""


@dataclass(frozen=True, kw_only=True)
class PastAttempt:
    """An earlier attempt that had begun to train."""

    is_sudden: bool
    trained_s: float
    """By a clock that does not jump; without what came after its newest note, such as a hang."""
    started_s: float
    """From its start until it trained."""


@dataclass(frozen=True, kw_only=True)
class PastSaves:
    """What is known of a run when an attempt begins."""

    num_failures: int = 0
    """Failures without warning that count."""
    trained_s: float = 0.0
    """Seconds of training in which they happened."""
    stalls_s: tuple[float, ...] = ()
    """How long training waited for a save, as attempts have measured it."""
    writes_s: tuple[float, ...] = ()
    """How long the newest saves took to be committed."""
    restart_s: float | None = None
    """How long the attempts took from their start until they trained; the middle one."""


def read_past_saves(run: RunDir, *, before: int, now: float) -> PastSaves:
    """Return what the attempts before `before` say; where none has trained, how long that one took from its start until now."""
    ledger = Ledger.read(run)
    earlier = [one for one in ledger.attempts if one.attempt < before]
    past, this = make_past_saves(earlier, read_marks(run)), ledger.attempt(before)
    if past.restart_s is None and this is not None:
        return replace(past, restart_s=max(0.0, now - this.started_at))
    return past


def make_past_saves(attempts: Sequence[Attempt], marks: Sequence[Mark]) -> PastSaves:
    """Return what attempts, oldest first, and their notes say."""
    all_marks = [[mark for mark in marks if mark.attempt == one.attempt] for one in attempts]
    past = [found for one, some in zip(attempts, all_marks, strict=True) if (found := _past_attempt(one, some))]
    known = [mark for some in all_marks for mark in some]  # of these attempts only, in the order of time
    writes = [mark.seconds for mark in known if mark.kind == "save" and mark.seconds is not None]
    stalls = [mark.interval["stall_s"] for mark in known if mark.interval.get("is_measured")]
    return summarize_attempts(past, stalls_s=stalls, writes_s=writes)


def summarize_attempts(
    past: Sequence[PastAttempt], *, stalls_s: Sequence[float], writes_s: Sequence[float]
) -> PastSaves:
    """Return what attempts, oldest first, say together; with the stalls and the times of writing of their saves."""
    failed = [number for number, one in enumerate(past) if one.is_sudden]
    counted = past[failed[-NUM_NEWEST_FAILURES] :] if len(failed) >= NUM_NEWEST_FAILURES else past
    return PastSaves(
        num_failures=sum(one.is_sudden for one in counted),
        trained_s=sum(one.trained_s for one in counted),
        stalls_s=tuple(stalls_s[-1:]),
        writes_s=tuple(writes_s[-_NUM_NEWEST_SAVES:]),
        restart_s=median_high(one.started_s for one in past) if past else None,
    )


def _past_attempt(one: Attempt, marks: Sequence[Mark]) -> PastAttempt | None:
    begin = next((mark for mark in marks if mark.kind == "begin"), None)
    if begin is None:
        return None
    phases = [mark for mark in marks if mark.kind == "phases"]
    reached = max(mark.step for mark in marks)
    saved = max([begin.step, *(mark.step for mark in marks if mark.kind == "save")])
    sudden = _SUDDEN_BY_CAUSE[one.cause or Cause.UNEXPLAINED]
    return PastAttempt(
        is_sudden=sudden == "yes" or (sudden == "if steps are lost" and reached > saved),
        trained_s=sum(phases[-1].phases.values()) if phases else 0.0,
        started_s=max(0.0, begin.at - one.started_at),
    )
