"""Which rank the others wait for: the summaries of all ranks in, a verdict out. Pure.

A collective in which every rank waits for every other ends when the last rank has launched it. How late a rank launches it, after the
middle one of the ranks, is what the others wait for it. No rank is named unless it is late in most steps, in both halves of what was
seen, and by more than the clocks may differ: on a busy machine, ranks are late in turn. Where ranks may be late for another reason than
that they are slow, or where not all ranks have reported, nothing is said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from msgspec import structs

from ddp_hpc.cluster.slow_ranks.launches import Launches, is_to_one, waits_for_all
from ddp_hpc.cluster.slow_ranks.step_starts import step_starts
from ddp_hpc.cluster.slow_ranks.summary import Phases, RankReport
from ddp_hpc.run.run_dir.timeline import SlowRank

LEAST_STEPS = 20
LEAST_LOST_SHARE = 0.10
"""Of a step: what the others wait for a slow rank, in the middle one of the steps."""
LEAST_LATE_SHARE = 0.8
"""The share of the steps in which a slow rank is late by at least half of `LEAST_LOST_SHARE`."""
LEAST_EXPLAINED = 0.8
"""The share of the wait that one phase of the slow rank must explain to be named as the cause."""
NEWEST_STEPS = 50
"""How many steps are judged at least, where there are as many."""
NEWEST_S = 10.0
"""How long a time is judged at least, where the record goes back as far."""
LEAST_APART = 2 / 3
"""The share of its lateness by which a slow rank must be later than every rank that is not slow. Where the lateness grows from rank to rank,
the ranks have different tasks, as the stages of a pipeline have."""
BACKWARD = "backward"


@dataclass(frozen=True, kw_only=True)
class SlowRankVerdict:
    """What the launches of one look say."""

    slow: tuple[SlowRank, ...] = ()
    clear: frozenset[int] = frozenset()
    """The ranks that were compared, and were late by less than half of what makes a rank slow."""
    num_steps: int = 0
    seconds: float = 0.0
    """For how long the ranks were seen."""
    step_s: float = 0.0
    lost_s: Mapping[int, float] = field(default_factory=dict)
    """Rank -> how much later than the middle one of the others it was, in the middle one of the steps; for the ranks that were compared."""
    unknown: str = ""
    """Why nothing can be said; empty where something can."""


@dataclass(frozen=True)
class _JoinedLaunches:
    """The collectives that several ranks have launched, as a table."""

    ranks: Sequence[RankReport]
    kinds: Sequence[int]
    at_s: Sequence[Sequence[float]]
    """By collective, then by rank; with one clock."""
    error_s: float


def judge(summaries: Sequence[RankReport]) -> SlowRankVerdict:
    """Return which ranks are slow, by the process group in which the most time is lost."""
    if {one.rank for one in summaries} != {*range(max((one.world_size for one in summaries), default=2))}:
        return SlowRankVerdict(unknown="not all ranks have reported")
    if len({one.turn for one in summaries}) > 1:
        return SlowRankVerdict(unknown="some ranks have not reported again")
    # Of a group of some ranks only, the others do not wait for its ranks.
    groups = set.intersection(*({launches.group for launches in one.launches} for one in summaries))
    clocks = [ranks for ranks in _group_by_clock(summaries) if len(ranks) > 1]
    found = [_verdict_of(ranks, group) for ranks in clocks for group in sorted(groups)]
    if clocks and not found:
        return SlowRankVerdict(unknown="no process group of all ranks has collectives")
    if not found:
        return SlowRankVerdict(unknown="fewer than two ranks whose clocks can be compared have reported collectives")
    worst = max(
        found, key=lambda one: (not one.unknown, max((slow.lost_s for slow in one.slow), default=0.0), one.seconds)
    )
    late = {slow.rank for one in found for slow in one.slow}
    return replace(worst, clear=frozenset().union(*(one.clear for one in found)) - late)


def _group_by_clock(summaries: Iterable[RankReport]) -> list[list[RankReport]]:
    """Group the ranks whose times can be compared: those on one node, and those on nodes whose clocks were compared."""
    nodes: dict[tuple[str, int], list[RankReport]] = defaultdict(list)
    for one in sorted(summaries, key=lambda one: one.rank):
        nodes[one.node, one.node_rank].append(one)  # containers on several nodes may have one name
    compared: list[RankReport] = []
    alone: list[list[RankReport]] = []
    for ranks in nodes.values():
        clock = next((one.clock for one in ranks if one.clock is not None), None)
        has_rank_zero = ranks[0].rank == 0
        if has_rank_zero or clock is not None:
            # A node's clock is compared by one of its ranks, and holds for all of them.
            compared += [structs.replace(one, clock=None if has_rank_zero else clock) for one in ranks]
        else:
            alone.append(ranks)
    return [ranks for ranks in (compared, *alone) if ranks]


def _verdict_of(summaries: Sequence[RankReport], group: str) -> SlowRankVerdict:
    """Judge the ranks in one process group."""
    joined = _join(summaries, group)
    if joined is None:
        return SlowRankVerdict(
            unknown="the ranks have no collectives of gloo in common, in which each waits for all, in what they have reported"
        )
    reference = [sorted(times)[(len(times) - 1) // 2] for times in joined.at_s]  # of two ranks, the one that waits
    all_starts = step_starts(joined.kinds, reference)
    starts = _newest_starts(all_starts, reference)
    if not starts:
        return SlowRankVerdict(unknown="the collectives do not repeat in steps")
    num_steps = len(starts) - 1
    if num_steps < LEAST_STEPS:
        return SlowRankVerdict(unknown=f"fewer than {LEAST_STEPS} steps have been seen of all ranks")
    if 2 * max(_num_to_one_launches(one) for one in joined.ranks) >= len(all_starts) - 1:
        return SlowRankVerdict(unknown="ranks wait for single other ranks in each step")
    found = _compare(joined, reference, starts)
    return replace(found, slow=tuple(replace(one, cause=cause_of(one, found.slow, joined.ranks)) for one in found.slow))


def _compare(joined: _JoinedLaunches, reference: Sequence[float], starts: Sequence[int]) -> SlowRankVerdict:
    """Judge the ranks by their launches in the steps that begin at `starts`."""
    seconds = reference[starts[-1]] - reference[starts[0]]
    step_s = median(reference[end] - reference[start] for start, end in pairwise(starts))
    steps = [_beyond_others(_lateness(joined.at_s[start:end], reference[start:end])) for start, end in pairwise(starts)]
    nodes = {one.rank: one.node for one in joined.ranks}
    lost = dict(zip(nodes, zip(*steps, strict=True), strict=True))
    lost_s = {rank: median(in_each) for rank, in_each in lost.items()}
    if max(lost_s.values()) >= step_s:
        return SlowRankVerdict(unknown="a rank is late by more than a step, so the others do not wait for it")
    slow = [rank for rank in lost if _is_slow(lost[rank], step_s) and lost_s[rank] > 2 * joined.error_s]
    if 2 * len(slow) >= max(len(lost), 3):
        return SlowRankVerdict(unknown="half of the ranks are late: a clock was set, or the ranks have different tasks")
    next_s = max((lost_s[rank] for rank in lost if rank not in slow), default=0.0)
    least_s = min((lost_s[rank] for rank in slow), default=0.0)
    if slow and least_s - max(next_s, 0.0) < LEAST_APART * least_s:
        return SlowRankVerdict(unknown="the ranks are late by different times, as stages of a pipeline are")
    num_waiting = len(lost) - len(slow)
    named = tuple(
        SlowRank(rank=rank, node=nodes[rank], lost_s=lost_s[rank], share=lost_s[rank] / step_s, num_waiting=num_waiting)
        for rank in sorted(slow, key=lambda rank: -lost_s[rank])
    )
    # Between the two, a rank stays what it was.
    clear = frozenset(rank for rank in lost if lost_s[rank] < LEAST_LOST_SHARE * step_s / 2)
    return SlowRankVerdict(
        slow=named, clear=clear, num_steps=len(starts) - 1, seconds=seconds, step_s=step_s, lost_s=lost_s
    )


def _join(summaries: Sequence[RankReport], group: str) -> _JoinedLaunches | None:
    """Return the collectives of a group that all of its ranks have reported, and in which each waits for all; None where there are none."""
    members = [(one, launches) for one in summaries for launches in one.launches if launches.group == group]
    if len(members) < 2:
        return None
    tables = [_launches_by_seq(one, launches) for one, launches in members]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    # Where one number means different collectives, the ranks do not run the same program.
    if not common or any(len({table[seq][0] for table in tables}) > 1 for seq in common):
        return None
    common = [seq for seq in common if waits_for_all(tables[0][seq][0])]
    if not common:
        return None
    numbers: dict[str, int] = {}
    return _JoinedLaunches(
        ranks=[one for one, _ in members],
        kinds=[numbers.setdefault(tables[0][seq][0], len(numbers)) for seq in common],
        at_s=[[table[seq][1] for table in tables] for seq in common],
        error_s=2 * max((one.clock.error_s for one, _ in members if one.clock is not None), default=0.0),
    )


def _launches_by_seq(summary: RankReport, launches: Launches) -> dict[int, tuple[str, float]]:
    """Return kind and time of each collective by its number, by the clock of rank zero's node."""
    ahead_s = summary.clock.ahead_s if summary.clock is not None else 0.0
    rows = zip(launches.seqs, launches.kinds, launches.at_us, strict=True)
    return {seq: (summary.kinds[kind], at_us / 1e6 - ahead_s) for seq, kind, at_us in rows}


def _newest_starts(starts: list[int], times: Sequence[float]) -> list[int]:
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


def _beyond_others(late: Sequence[float]) -> list[float]:
    """Return how much later each rank was than the middle one of the others (of an even number, the lower one)."""
    ordered = sorted(late)
    middle = (len(late) - 2) // 2
    return [one - ordered[middle + 1 if one <= ordered[middle] else middle] for one in late]


def _num_to_one_launches(summary: RankReport) -> int:
    """Return how many of a rank's collectives end on one rank, for which only that rank waits; so it may be late where another is slow."""
    to_one = {index for index, kind in enumerate(summary.kinds) if is_to_one(kind)}
    return sum(kind in to_one for launches in summary.launches for kind in launches.kinds)


def _is_slow(lost: Sequence[float], step_s: float) -> bool:
    """Tell whether a rank is late in most steps, and by enough, in the whole as in each half."""
    half = len(lost) // 2
    least_s = LEAST_LOST_SHARE * step_s
    is_often = sum(one >= least_s / 2 for one in lost) / len(lost) >= LEAST_LATE_SHARE
    return is_often and median(lost) >= least_s and min(median(lost[:half]), median(lost[half:])) >= 0.8 * least_s


def cause_of(slow: SlowRank, all_slow: Sequence[SlowRank], ranks: Sequence[RankReport]) -> str:
    """Return the phase in which a slow rank loses most of its time; empty where none explains enough.

    A wait for other ranks is part of the phase backward, so that phase takes as long on all ranks. What no other phase
    explains of a slow rank's lateness, it has lost there.
    """
    named = {one.rank for one in all_slow}
    own = next((_seconds_per_step(one.phases) for one in ranks if one.rank == slow.rank), {})
    others = [found for one in ranks if one.rank not in named and (found := _seconds_per_step(one.phases))]
    if not own or not others:
        return ""
    longer = {phase: own[phase] - median(one.get(phase, 0.0) for one in others) for phase in own if phase != BACKWARD}
    longer[BACKWARD] = slow.lost_s - sum(longer.values())
    phase, seconds = max(longer.items(), key=lambda item: item[1])
    return phase if LEAST_EXPLAINED <= seconds / slow.lost_s <= 2 - LEAST_EXPLAINED else ""


def _seconds_per_step(phases: Phases | None) -> Mapping[str, float]:
    if phases is None or not phases.num_steps:
        return {}
    return {phase: seconds / phases.num_steps for phase, seconds in phases.seconds.items()}
