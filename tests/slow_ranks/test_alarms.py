"""When an alarm begins and ends, what it says, and what the run keeps of it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.cluster.slow_ranks.alarms import MOST, MOST_OF_RANK, Alarms
from ddp_hpc.cluster.slow_ranks.judge import SlowRankVerdict
from ddp_hpc.cluster.slow_ranks.reporter import LOOK_S, pause_s
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import SlowRank, read_alarms, record_alarms

FIVE = SlowRank(rank=5, node="node7", lost_s=0.023, share=0.18, num_waiting=7)
SLOW = SlowRankVerdict(slow=(FIVE,), num_steps=30, seconds=6.0, step_s=0.128)
HEALTHY = SlowRankVerdict(clear=frozenset({4, 5}), num_steps=30, seconds=6.0, step_s=0.128)
BETWEEN = replace(HEALTHY, clear=frozenset({4}))
"""Rank 5 was compared and is a little below the threshold, or was not compared."""
UNKNOWN = SlowRankVerdict(unknown="nothing was seen")


def test_an_alarm_begins_after_two_looks_that_agree_and_ends_after_two_healthy_ones_in_a_row(tmp_path: Path) -> None:
    run, alarms = RunDir(tmp_path), Alarms(attempt=2)
    changes = []

    for step, verdict in enumerate([HEALTHY, SLOW, SLOW, HEALTHY, BETWEEN, HEALTHY, UNKNOWN, HEALTHY, SLOW]):
        changed = alarms.update(verdict, now=100.0 + step, step=10 * step)
        record_alarms(run, changed)
        changes.append(len(changed))
        if step == 2:
            [one] = changed
            assert one.sentence() == ("rank 5 on node7 is slow: the other 7 ranks wait 23 ms (18%) of each step for it")
            assert read_alarms(run) == changed
            assert one.ended_at is None

    assert changes == [0, 0, 1, 0, 0, 0, 0, 1, 0]
    [kept] = read_alarms(run)
    assert (kept.rank, kept.since_step, kept.until_step, kept.at, kept.ended_at) == (5, 20, 70, 102.0, 107.0)


def test_two_looks_agree_where_both_name_the_rank() -> None:
    alarms, short = Alarms(attempt=0), SLOW
    other = replace(short, slow=(replace(FIVE, rank=4),))
    begun = [bool(alarms.update(one, now=0.0, step=None)) for one in (short, other, short, UNKNOWN, short)]
    assert begun == [False, False, False, False, True]


def test_a_rank_at_the_threshold_has_a_bounded_number_of_lines() -> None:
    alarms, chance = Alarms(attempt=0), random.Random(1)
    looks = [chance.choice([SLOW, HEALTHY]) for _ in range(4320)]
    assert sum(len(alarms.update(one, now=0.0, step=None)) for one in looks) <= 2 * MOST_OF_RANK
    alarms = Alarms(attempt=0)
    everybody = replace(SLOW, slow=tuple(replace(FIVE, rank=rank) for rank in range(512)))
    assert sum(len(alarms.update(everybody, now=0.0, step=None)) for _ in range(9)) == MOST


def test_a_cause_that_is_found_later_is_said_then_and_the_attempts_end_ends_all_alarms(tmp_path: Path) -> None:
    run, alarms = RunDir(tmp_path), Alarms(attempt=0)
    record_alarms(run, [*alarms.update(SLOW, now=0.0, step=None), *alarms.update(SLOW, now=0.0, step=None)])
    [known] = alarms.update(replace(SLOW, slow=(replace(FIVE, cause="data"),)), now=1.0, step=None)
    record_alarms(run, [known])
    assert known.sentence().endswith("; cause: data")

    record_alarms(run, alarms.end_all(now=2.0, step=7))

    [kept] = read_alarms(run)
    assert (kept.cause, kept.ended_at) == ("data", 2.0)
    run.slow_ranks.write_text('{"rank": 1}\nnonsense\n' + run.slow_ranks.read_text())
    assert read_alarms(run) == [kept]


@pytest.mark.parametrize(
    ("entries", "ranks", "times"), [(0, 2, 1), (250, 64, 2), (251, 2, 2), (2000, 2, 8), (10, 1000, 32)]
)
def test_a_long_record_and_a_large_world_are_asked_less_often(entries: int, ranks: int, times: int) -> None:
    assert pause_s(entries, ranks, is_early=True) == times * LOOK_S
    if ranks == 2:
        assert pause_s(entries, ranks, is_early=False) == 4 * times * LOOK_S
