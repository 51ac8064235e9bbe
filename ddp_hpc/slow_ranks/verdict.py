"""Which rank the others wait for: the summaries of all ranks in, a verdict out. Pure.

A collective ends when the last rank has launched it. How late a rank launches it, after the middle one of the ranks, is what the others
wait for it. No rank is named unless it is late in most steps, in both halves of what was seen, and by more than the
clocks may differ: on a busy machine, ranks are late in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from msgspec import structs

from ddp_hpc.slow_ranks.launches import Launches
from ddp_hpc.slow_ranks.steps import step_starts
from ddp_hpc.slow_ranks.summary import Phases, Summary

LEAST_STEPS = 20
LEAST_SHARE = 0.10
"""Of a step: what the others wait for a slow rank, in the middle one of the steps."""
LEAST_OFTEN = 0.8
"""The share of the steps in which a slow rank is late by at least half of `LEAST_SHARE`."""
LEAST_COVERAGE = 0.8
"""The share of the wait that one phase of the slow rank must explain to be named as the cause."""
NEWEST_STEPS = 50
"""How many steps are judged at least, where there are as many."""
NEWEST_S = 10.0
"""How long a time is judged at least, where the record goes back as far."""
BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A rank for which the others wait."""

    rank: int
    node: str
    lost_s: float
    """How long the others wait for it in each step."""
    share: float
    """That, as a share of the step."""
    num_waiting: int
    """How many other ranks wait."""
    cause: str = ""
    """The phase in which it takes longer than the others; empty where that is not known."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the launches of one look say."""

    slow: tuple[SlowRank, ...] = ()
    num_steps: int = 0
    seconds: float = 0.0
    """For how long the ranks were seen."""
    step_s: float = 0.0
    unknown: str = ""
    """Why nothing can be said; empty where something can."""

    @property
    def is_known(self) -> bool:
        return not self.unknown


@dataclass(frozen=True)
class _Joined:
    """The collectives that several ranks have launched, as a table."""

    ranks: Sequence[Summary]
    kinds: Sequence[int]
    at_s: Sequence[Sequence[float]]
    """By collective, then by rank; with one clock."""
    error_s: float


def judge(summaries: Sequence[Summary]) -> Verdict:
    """Return which ranks are slow, by the process group in which the most time is lost."""
    groups = {launches.group for one in summaries for launches in one.launches}
    found = [
        _verdict_of(ranks, group) for ranks in _of_one_clock(summaries) for group in sorted(groups) if len(ranks) > 1
    ]
    if not found:
        return Verdict(unknown="fewer than two ranks whose clocks can be compared have reported collectives")
    return max(found, key=lambda one: (one.is_known, max((slow.lost_s for slow in one.slow), default=0.0), one.seconds))


def _of_one_clock(summaries: Iterable[Summary]) -> list[list[Summary]]:
    """Group the ranks whose times can be compared: those on one node, and those on nodes whose clocks were compared."""
    nodes: dict[str, list[Summary]] = defaultdict(list)
    for one in sorted(summaries, key=lambda one: one.rank):
        nodes[one.node].append(one)
    compared: list[Summary] = []
    alone: list[list[Summary]] = []
    for ranks in nodes.values():
        clock = next((one.clock for one in ranks if one.clock is not None), None)
        has_rank_zero = ranks[0].rank == 0
        if has_rank_zero or clock is not None:
            # A node's clock is compared by one of its ranks, and holds for all of them.
            compared += [structs.replace(one, clock=None if has_rank_zero else clock) for one in ranks]
        else:
            alone.append(ranks)
    return [_of_one_turn(ranks) for ranks in (compared, *alone) if ranks]


def _of_one_turn(ranks: Sequence[Summary]) -> list[Summary]:
    """Leave out the ranks that have not reported when the first one has."""
    return [one for one in ranks if one.turn == ranks[0].turn]


def _verdict_of(summaries: Sequence[Summary], group: str) -> Verdict:
    """Judge the ranks in one process group."""
    joined = _join(summaries, group)
    if joined is None:
        return Verdict(unknown="the ranks have no collectives in common in what they have reported")
    reference = [_lower_median(times) for times in joined.at_s]
    starts = _newest(step_starts(joined.kinds, reference), reference)
    if not starts:
        return Verdict(unknown="the collectives do not repeat in steps")
    num_steps = max(len(starts) - 1, 0)
    if num_steps < LEAST_STEPS:
        return Verdict(num_steps=num_steps, unknown=f"fewer than {LEAST_STEPS} steps have been seen of all ranks")
    seconds = reference[starts[-1]] - reference[starts[0]]
    step_s = median(reference[end] - reference[start] for start, end in pairwise(starts))
    late = [_lateness(joined.at_s[start:end], reference[start:end]) for start, end in pairwise(starts)]
    slow = [
        (one, lost_s)
        for index, one in enumerate(joined.ranks)
        if _is_slow(lost := [_beyond_others(step, index) for step in late], step_s)
        and (lost_s := median(lost)) > 2 * joined.error_s
    ]
    named = tuple(
        SlowRank(
            rank=one.rank, node=one.node, lost_s=lost_s, share=lost_s / step_s, num_waiting=one.world_size - len(slow)
        )
        for one, lost_s in sorted(slow, key=lambda pair: -pair[1])
    )
    found = Verdict(slow=named, num_steps=num_steps, seconds=seconds, step_s=step_s)
    return replace(found, slow=tuple(replace(one, cause=cause_of(one, found.slow, joined.ranks)) for one in named))


def _join(summaries: Sequence[Summary], group: str) -> _Joined | None:
    """Return the collectives of a group that all of its ranks have reported; None where there are none."""
    members = [(one, launches) for one in summaries for launches in one.launches if launches.group == group]
    if len(members) < 2:
        return None
    tables = [_table(one, launches) for one, launches in members]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    # Where one number means different collectives, the ranks do not run the same program.
    if not common or any(len({table[seq][0] for table in tables}) > 1 for seq in common):
        return None
    numbers: dict[str, int] = {}
    return _Joined(
        ranks=[one for one, _ in members],
        kinds=[numbers.setdefault(tables[0][seq][0], len(numbers)) for seq in common],
        at_s=[[table[seq][1] for table in tables] for seq in common],
        error_s=2 * max((one.clock.error_s for one, _ in members if one.clock is not None), default=0.0),
    )


def _table(summary: Summary, launches: Launches) -> dict[int, tuple[str, float]]:
    """Return kind and time of each collective by its number, by the clock of rank zero's node."""
    ahead_s = summary.clock.ahead_s if summary.clock is not None else 0.0
    rows = zip(launches.seqs, launches.kinds, launches.at_us, strict=True)
    return {seq: (summary.kinds[kind], at_us / 1e6 - ahead_s) for seq, kind, at_us in rows}


def _newest(starts: list[int], times: Sequence[float]) -> list[int]:
    """Return the newest steps: `NEWEST_STEPS` of them, and more where these took less than `NEWEST_S`."""
    for index in range(len(starts) - 1 - NEWEST_STEPS, 0, -1):
        if times[starts[-1]] - times[starts[index]] >= NEWEST_S:
            return starts[index:]
    return starts


def _lateness(times: Sequence[Sequence[float]], reference: Sequence[float]) -> list[float]:
    """Return how late each rank was in one step: at the collective of it at which it was latest."""
    # Within a backward pass, the ranks do not wait for each other, so lateness adds up until the last bucket. After that they have
    # waited, and a further collective in the same step (of the loss) finds them together again.
    late = [[at - middle for at in row] for row, middle in zip(times, reference, strict=True)]
    return [max(column) for column in zip(*late, strict=True)]


def _beyond_others(late: Sequence[float], index: int) -> float:
    """Return how much later one rank was than the middle one of the others."""
    return late[index] - _lower_median([one for other, one in enumerate(late) if other != index])


def _lower_median(values: Sequence[float]) -> float:
    """Return the middle value, of an even number the lower one: of two ranks, the one that waits."""
    return sorted(values)[(len(values) - 1) // 2]


def _is_slow(lost: Sequence[float], step_s: float) -> bool:
    """Tell whether a rank is late in most steps, and by enough, in the whole as in each half."""
    half = len(lost) // 2
    least_s = LEAST_SHARE * step_s
    often = sum(one >= least_s / 2 for one in lost) / len(lost)
    return (
        often >= LEAST_OFTEN
        and median(lost) >= least_s
        and min(median(lost[:half]), median(lost[half:])) >= 0.8 * least_s
    )


def cause_of(slow: SlowRank, all_slow: Sequence[SlowRank], ranks: Sequence[Summary]) -> str:
    """Return the phase in which a slow rank loses most of its time; empty where none explains enough.

    A wait for other ranks is part of the phase backward, so that phase takes as long on all ranks. What no other phase
    explains of a slow rank's lateness, it has lost there.
    """
    named = {one.rank for one in all_slow}
    own = next((_a_step(one.phases) for one in ranks if one.rank == slow.rank), {})
    others = [found for one in ranks if one.rank not in named and (found := _a_step(one.phases))]
    if not own or not others:
        return ""
    longer = {
        phase: own[phase] - median(other.get(phase, 0.0) for other in others) for phase in own if phase != BACKWARD
    }
    longer[BACKWARD] = slow.lost_s - sum(longer.values())
    phase, seconds = max(longer.items(), key=lambda item: item[1])
    return phase if LEAST_COVERAGE <= seconds / slow.lost_s <= 2 - LEAST_COVERAGE else ""


def _a_step(phases: Phases | None) -> Mapping[str, float]:
    if phases is None or not phases.num_steps:
        return {}
    return {phase: seconds / phases.num_steps for phase, seconds in phases.seconds.items()}
