"""What one rank reports for the search of slow ranks: a small file in the run directory, replaced at each look."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec

from ddp_hpc.base.durable import make_directories, replace_text
from ddp_hpc.base.record import read_record
from ddp_hpc.cluster.slow_ranks.launches import Launches
from ddp_hpc.run.run_dir.paths import RunDir


class ClockOffset(msgspec.Struct, frozen=True):
    """How far the clock of a node is ahead of the clock of rank zero's node."""

    ahead_s: float
    error_s: float
    """How far this may be from the truth: half of the round trip."""


class Phases(msgspec.Struct, frozen=True):
    """The time that a rank has spent in each part of its steps since its last report."""

    num_steps: int
    seconds: dict[str, float]


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank reports."""

    rank: int
    world_size: int
    node: str
    """The name of its node: ranks of one node share a clock."""
    node_rank: int = 0
    """The number of its node; several may have one name."""
    turn: int
    """The number of this moment. All ranks report at the same moments, so they report the same collectives."""
    kinds: list[str]
    launches: list[Launches]
    clock: ClockOffset | None = None
    """None where it is not known, and on rank zero's node."""
    phases: Phases | None = None
    """None where the loop is not ours."""


def write_report(run: RunDir, attempt: int, summary: RankReport) -> None:
    """Replace the report of one rank. Differences stand for its numbers: they take a third of the size."""
    path = run.launches(attempt, summary.rank)
    make_directories(path.parent)
    changed = _map_numbers(summary, lambda numbers: [after - before for before, after in pairwise([0, *numbers])])
    replace_text(path, msgspec.json.encode(changed), durable=False)


def read_report(path: Path) -> RankReport | None:
    """Return the report of one rank; None where there is none yet, or it is not one of ours."""
    summary = read_record(path, RankReport)
    return None if summary is None else _map_numbers(summary, lambda steps: [*accumulate(steps)])


def remove_reports(run: RunDir, attempt: int) -> None:
    """Remove the reports of an attempt that has ended, and what a writer that was killed has left of one."""
    for path in [*run.attempt_logs(attempt).glob("*rank-*.launches.json*")]:
        path.unlink(missing_ok=True)


def _map_numbers(summary: RankReport, change: Callable[[Sequence[int]], list[int]]) -> RankReport:
    changed = [Launches(one.group, change(one.seqs), one.kinds, change(one.at_us)) for one in summary.launches]
    return msgspec.structs.replace(summary, launches=changed)
