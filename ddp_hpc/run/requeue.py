"""What follows an attempt: a table from how it ended to what is done next. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_hpc.run.run_dir.ledger import Attempt, Cause, End, Ending, Next, RootFailure
from ddp_hpc.run.spec.launch import RestartSpec

SLURM_SIGNAL_EARLY_S = 60.0
"""How much earlier than asked Slurm may send the signal of `--signal` (sbatch(1))."""
_NUM_SAVES_IN_LEAD = 2
"""How many saves have to fit: one that has just begun is finished first."""
_EXIT_S = 5.0
"""For the ranks to agree on a step, and the processes to exit."""

_REQUEUE_RESERVE_S = 15.0


@dataclass(frozen=True)
class RequeueRule:
    """What follows one cause."""

    ending: Ending
    next: Next
    """`REQUEUE` stands for what the user has chosen in `restart.by`: to requeue the job, or to submit a successor."""
    is_failure: bool = False
    """Whether it counts as a failure, for the limit on failures in a row without a new checkpoint."""


RULES: Mapping[Cause, RequeueRule] = {
    Cause.FINISHED: RequeueRule(Ending.FINISHED, Next.NOTHING),
    Cause.REFUSED: RequeueRule(Ending.REFUSED, Next.NOTHING),
    Cause.CANCELLED: RequeueRule(Ending.CANCELLED, Next.NOTHING),
    Cause.FENCED: RequeueRule(Ending.FENCED, Next.NOTHING),
    Cause.STOP_ASKED: RequeueRule(Ending.STOPPED, Next.NOTHING),
    Cause.REQUEUE_ASKED: RequeueRule(Ending.STOPPED, Next.REQUEUE),
    Cause.SCRIPT_ASKED: RequeueRule(Ending.STOPPED, Next.REQUEUE, is_failure=True),
    Cause.PREEMPTED: RequeueRule(Ending.STOPPED, Next.REQUEUE),
    Cause.TIME_LIMIT: RequeueRule(Ending.STOPPED, Next.REQUEUE, is_failure=True),
    Cause.WORKER_CRASHED: RequeueRule(Ending.FAILED, Next.IN_PLACE, is_failure=True),
    Cause.HANG: RequeueRule(Ending.FAILED, Next.IN_PLACE, is_failure=True),
    Cause.NODE_FAILED: RequeueRule(Ending.FAILED, Next.REQUEUE, is_failure=True),
    Cause.DIVERGED: RequeueRule(Ending.FAILED, Next.NOTHING),
    Cause.RANKS_DIFFER: RequeueRule(Ending.FAILED, Next.IN_PLACE, is_failure=True),
    Cause.NOT_SAVED: RequeueRule(Ending.FAILED, Next.NOTHING),
    Cause.UNEXPLAINED: RequeueRule(Ending.FAILED, Next.REQUEUE, is_failure=True),
    Cause.SUPERVISOR_DIED: RequeueRule(Ending.FAILED, Next.IN_PLACE, is_failure=True),
    Cause.SUSPENDED: RequeueRule(Ending.FAILED, Next.IN_PLACE),
    Cause.PREFLIGHT: RequeueRule(Ending.FAILED, Next.NOTHING),
}
"""A preemption is not a failure of the run, so it does not count. A time limit counts: a run that cannot commit between two
time limits never will. A script that asks to be started again counts for the same reason."""

MESSAGE_BY_NEXT: Mapping[Next, str] = {
    Next.IN_PLACE: "ddp-hpc starts the workers again",
    Next.REQUEUE: "the job goes back into the queue, and the next attempt begins when it starts again",
    Next.SUCCESSOR: "the run continues in a new job, which starts after this one",
    Next.SLURM: "Slurm has put the job back into the queue, and the next attempt begins when it starts again",
}
"""What follows an attempt -> what the job's log says of it, behind the reason for the attempt's end."""


@dataclass(frozen=True, kw_only=True)
class DecisionInputs:
    """All that the decision depends on."""

    cause: Cause
    is_committed: bool = False
    """Whether the workers exited after a commit."""
    has_obeyed: bool = True
    """Whether the workers did not fail when they were asked to stop."""
    num_without_progress: int = 0
    """Failures in a row without a new checkpoint, this one included."""
    has_no_report: bool = False
    """Whether no process wrote an error report: perhaps none could even be started."""
    without_progress: str = "ended without a new checkpoint"
    """What those failures have in common, as a text."""
    fails_again: str = ""
    """The sample of which this attempt failed as the one before it (`repeated_sample`)."""
    num_alike: int = 0
    """Failures in a row that are alike, though files were saved between them (`num_alike`); 0 where progress is not counted by files."""
    differs_as: int | None = None
    """The earlier attempt in which the ranks differed after the same step in the same way (`blame.earlier_same_difference`)."""
    is_on_slurm: bool = True
    is_supervised: bool = False
    """Whether a supervisor is there to start another attempt without Slurm."""
    goes_on_here: bool = False
    """Whether the workload asks it to do so after a failure that had made progress (`Workload.goes_on_here`)."""
    is_requeued_by_slurm: bool = False
    """Whether Slurm has requeued the job without an order of this program."""
    failed_nodes: Sequence[str] = ()
    """The nodes that failed, where that is known."""
    bad_nodes: Sequence[str] = ()
    """Nodes of the job that have failed too often."""
    may_requeue: bool = True
    """Whether the user lets Slurm requeue the job (`slurm.requeue`)."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done next."""

    ending: Ending
    next: Next = Next.NOTHING
    exclude: tuple[str, ...] = ()
    """Nodes that the next attempt should not get."""
    why: str = ""
    """Why there is no next attempt, where one might be expected."""

    def make_end(self, *reasons: str, **of_attempt: Any) -> End:
        """Return the end of an attempt that this decision follows, with the reasons for it, and more fields of `End`."""
        return End(
            ending=self.ending,
            exit_code=self.ending.exit_code,
            reason="; ".join(filter(None, [*reasons, self.why])),
            next=self.next,
            why_last=self.why,
            **of_attempt,
        )


def decide_next(situation: DecisionInputs, policy: RestartSpec) -> Decision:
    """Return what follows an attempt."""
    row = RULES[situation.cause]
    ending = Ending.STOPPED if situation.is_committed and row.next == Next.REQUEUE else row.ending
    if situation.is_requeued_by_slurm and row.next:
        return Decision(ending=ending, next=Next.SLURM, exclude=tuple(situation.bad_nodes))
    has_advanced = row.next == Next.IN_PLACE and situation.num_without_progress == 0 and policy.in_place
    goes_on_here = situation.cause == Cause.SUSPENDED or (
        situation.is_supervised
        and (situation.cause in {Cause.SCRIPT_ASKED, Cause.RANKS_DIFFER} or (situation.goes_on_here and has_advanced))
    )  # these need nothing from the user
    if not row.next or not (situation.is_on_slurm or goes_on_here):
        has_failed = situation.cause == Cause.STOP_ASKED and not situation.has_obeyed
        return Decision(ending=Ending.FAILED if has_failed else row.ending)
    if why := why_run_ends(situation, policy):
        return Decision(ending=Ending.FAILED, why=why)
    is_worth_trying = not situation.has_no_report or situation.num_without_progress <= 1
    is_right_here = row.next == Next.IN_PLACE and not situation.bad_nodes and policy.in_place and is_worth_trying
    if is_right_here or not situation.is_on_slurm:
        return Decision(ending=ending, next=Next.IN_PLACE)
    if policy.by == "requeue" and not situation.may_requeue:
        return Decision(
            ending=ending,
            why="the job does not go back into the queue, because `slurm.requeue` is false; submit the run again",
        )
    lost = situation.failed_nodes if situation.cause == Cause.NODE_FAILED else ()
    return Decision(ending=ending, next=Next(policy.by), exclude=tuple(sorted({*situation.bad_nodes, *lost})))


def why_run_ends(situation: DecisionInputs, policy: RestartSpec) -> str:
    """Return why a failure ends the run; empty where another attempt may follow."""
    if situation.fails_again and situation.cause == Cause.WORKER_CRASHED:
        return (
            f"`{situation.fails_again}` ended two attempts in a row in the same way, without progress between them, so the run "
            "ends: another attempt would fail there, too; correct it or leave it out, and submit the run again"
        )
    if situation.differs_as is not None and situation.cause == Cause.RANKS_DIFFER:
        return (
            f"in attempt {situation.differs_as}, each rank had the same values after the same step, so this does not happen by chance and the run "
            "ends: the code does not do the same on each rank (docs/integrity.md says what to look for), or a processor is wrong in "
            "the same way each time; correct it, and submit the run again, on other nodes if the code is right"
        )
    if situation.num_alike > policy.max_no_progress:
        return (
            f"{situation.num_alike} attempts in a row failed in the same way, each after as many saves and about as much time, so each seems to start "
            "over and the run ends (`restart.max_no_progress`); correct the cause, have the script load what it has saved, and submit the run again"
        )
    count = situation.num_without_progress
    if not RULES[situation.cause].is_failure or count < policy.max_no_progress:
        return ""
    attempts = "1 attempt" if count == 1 else f"{count} attempts in a row"
    return f"{attempts} {situation.without_progress}, so the run ends (`restart.max_no_progress`); correct the cause, and submit the run again"


def requeue_reserve_s(lead_s: float) -> float:
    """Return how long before the time limit the last worker has to have exited.

    The supervisor needs this time to kill workers that do not exit, to ask Slurm, and to requeue the job. Where a node does not
    answer, that lasts longer: Slurm 22.05 requeues a job until KillWait after its limit, but only if a process of the job asks for it.
    """
    return min(_REQUEUE_RESERVE_S, lead_s / 3)


def lead_problem(*, lead_s: float, time_limit_min: float | None, save_s: float | None) -> str | None:
    """Return why `slurm.signal_lead_s` is too short to save, or leaves no time to train; None where it is right."""
    needed_s = 0.0 if save_s is None else _NUM_SAVES_IN_LEAD * save_s + _EXIT_S
    if save_s is not None and lead_s - requeue_reserve_s(lead_s) < needed_s:
        least = int(needed_s + min(_REQUEUE_RESERVE_S, needed_s / 2)) + 1
        return (
            f"`slurm.signal_lead_s` is {lead_s:g}, but a checkpoint of this run takes {save_s:.0f} s: Slurm may kill the "
            f"job in the middle of its last one. Set it to {least} or more."
        )
    # Slurm looks only every 30 s, so its signal may come a minute earlier:
    # https://slurm.schedmd.com/sbatch.html#OPT_signal
    if time_limit_min is not None and time_limit_min * 60 <= lead_s + SLURM_SIGNAL_EARLY_S:
        return (
            f"`resources.time_limit_min` is {time_limit_min:g}, but the run is asked to stop {lead_s:g} s before the limit, and "
            f"Slurm may ask {SLURM_SIGNAL_EARLY_S:g} s earlier: this leaves no time to train. Lower `slurm.signal_lead_s`, or ask for more time."
        )
    return None


def stop_within_problem(*, stop_within_s: float, lead_s: float) -> str | None:
    """Return why a script does not get the time to save that it may need before a time limit; None where it does."""
    left_s = lead_s - requeue_reserve_s(lead_s)
    if stop_within_s <= left_s:
        return None
    return (
        f"`script.stop_within_s` is {stop_within_s:g}, but before the time limit the script has only {left_s:g} s to save, because "
        f"`slurm.signal_lead_s` is {lead_s:g}. If it may need longer, set that to {stop_within_s + _REQUEUE_RESERVE_S:g}; otherwise lower `script.stop_within_s`."
    )


def num_without_progress(attempts: Sequence[Attempt], newest_step: int, cause: Cause) -> int:
    """Return how many failures in a row made no new checkpoint, the newest attempt, which ended of `cause`, included.

    `newest_step` is that of the newest checkpoint now, 0 without one. Attempts that did not fail neither count
    nor break the row.
    """
    count = 0
    step_after = newest_step
    newest_first = attempts[::-1]
    for index, attempt in enumerate(newest_first):
        if step_after > attempt.first_step:
            break
        ended_of = cause if index == 0 else attempt.cause or Cause.UNEXPLAINED
        # An earlier attempt that started no workers, because of nodes that had failed before, does not count, unless
        # the attempt before it started none, too: otherwise such attempts would follow each other without an end.
        only_avoided = (
            index > 0 and _avoids_nodes(attempt) and not any(map(_avoids_nodes, newest_first[index + 1 : index + 2]))
        )
        count += RULES[ended_of].is_failure and not only_avoided
        step_after = attempt.first_step
    return count


def repeated_sample(attempts: Sequence[Attempt], root: RootFailure, newest_step: int) -> str:
    """Return the sample of which the newest attempt failed as the one before it; empty where that is not proved.

    Both failures have to be proved to last, of one fingerprint, one entity and one version of it; the newest attempt has to
    have come no further: no new checkpoint, no later step. Of a script no step is known, so it is never proved.
    """
    if len(attempts) < 2:
        return ""
    before, newest = attempts[-2:]
    earlier = before.root
    is_same = replace(earlier, failed_step=None) == replace(root, failed_step=None) and bool(root.fingerprint)
    lasts = bool(root.entity and root.entity_version) and not root.may_recover
    is_next = before.attempt + 1 == newest.attempt and before.cause == Cause.WORKER_CRASHED
    is_without_progress = newest.first_step == before.last_step == newest_step
    step, step_before = root.failed_step, earlier.failed_step
    is_no_later = step is not None and step_before is not None and step <= step_before
    return root.entity if is_same and lasts and is_next and is_without_progress and is_no_later else ""


def num_alike(attempts: Sequence[Attempt], root: RootFailure, newest_step: int, *, now: float) -> int:
    """Return how many attempts in a row crashed as the newest did: with the same failure, after as many saves and about as much time.

    A script that starts over each time saves the same files anew, so that these change. One that goes on meets a rare failure at other times.
    """
    if not attempts or not root.fingerprint:
        return 0
    num_saves, times = newest_step - attempts[-1].first_step, [now - attempts[-1].started_at]
    for one in attempts[-2::-1]:
        times.append((one.ended_at or now) - one.started_at)
        is_alike = one.root.fingerprint == root.fingerprint and (one.last_step or 0) - one.first_step == num_saves
        if not (is_alike and max(times) <= 2 * min(times) + 30.0):  # a busy file system alone may take that
            return len(times) - 1
    return len(times)


def _avoids_nodes(attempt: Attempt) -> bool:
    """Tell whether an attempt started no workers because of nodes that had failed before: no node failed in it."""
    return attempt.cause == Cause.NODE_FAILED and not attempt.failed_nodes


def bad_nodes(attempts: Sequence[Attempt], policy: RestartSpec, *, now: float) -> list[str]:
    """Return the nodes that failed `restart.exclude_after` times or more in the last `restart.forget_h` hours.

    A node that has computed something wrong counts at once: it may do so again where nothing is compared.
    The worst come first; of those that failed equally often, the last to fail.
    """
    since = now - policy.forget_h * 3600
    failures: Counter[str] = Counter()
    for attempt in reversed(attempts):
        if (attempt.ended_at or 0.0) >= since:
            weight = policy.exclude_after if attempt.cause == Cause.RANKS_DIFFER else 1
            failures.update(dict.fromkeys(attempt.failed_nodes, weight))
    return sorted(
        (node for node in failures if failures[node] >= policy.exclude_after), key=lambda node: -failures[node]
    )
