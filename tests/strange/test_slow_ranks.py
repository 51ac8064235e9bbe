"""Trainings in which it is not plain who waits for whom."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ddp_hpc.job.slow_rank_monitor import SlowRankMonitor
from ddp_hpc.rank_probe.client import NoAnswerError, RankProbe
from ddp_hpc.run_dir.paths import RunDir
from ddp_hpc.slow_ranks.launches import read_launches
from ddp_hpc.slow_ranks.reporter import Reporter
from ddp_hpc.slow_ranks.summary import Clock, Summary, write_summary
from ddp_hpc.slow_ranks.verdict import judge
from tests.slow_ranks.made_launches import STEP_S, Made, of_rank


def named(made: Made) -> list[int]:
    return [one.rank for one in judge(made.summaries()).slow]


def test_a_node_that_is_slower_by_nature_has_both_of_its_ranks_named() -> None:
    nodes = ["old", "old", *["new"] * 6]
    made = Made(world_size=8, nodes=nodes, clocks={"new": Clock(0.0, 0.001)}, noise_s=0.005)
    made.delay = lambda rank, _: 0.4 * STEP_S if rank < 2 else 0.0
    slow = judge(made.summaries()).slow
    assert sorted(one.rank for one in slow) == [0, 1]
    assert {one.num_waiting for one in slow} == {6}


def test_with_batches_of_different_sizes_the_rank_that_has_most_is_named_and_one_a_little_above_is_not() -> None:
    sizes = [0.30, 0.31, 0.29, 0.33, 0.60]
    assert named(Made(world_size=5, delay=lambda rank, _: sizes[rank] * STEP_S, noise_s=0.002)) == [4]


def test_rank_zero_may_evaluate_and_log_alone() -> None:
    made = Made(delay=lambda rank, step: 0.0 if rank else (5.0 if step % 25 == 24 else 0.05) * STEP_S, noise_s=0.01)
    assert named(made) == []


def test_a_slow_rank_that_moves_is_named_where_it_is_now() -> None:
    made = Made(num_steps=200, delay=lambda rank, step: 0.5 * STEP_S * (rank == (1 if step < 100 else 3)))
    # The newest 10 s are judged: the last 70 steps or so.
    assert named(made) == [3]
    turns = Made(num_steps=200, delay=lambda rank, step: 0.5 * STEP_S * (rank == step % 4))
    assert named(turns) == []


def test_two_models_whose_steps_take_turns_are_one_step() -> None:
    made = Made(buckets=["all_reduce 9"], after=["all_reduce 70", "all_reduce 71"], delay=of_rank(1, 0.3 * STEP_S))
    assert named(made) == [1]


def test_a_process_group_of_some_ranks_does_not_hide_or_invent_a_slow_rank() -> None:
    whole = Made(delay=of_rank(2, 0.4 * STEP_S)).summaries()
    part = Made(world_size=2, group="1", noise_s=0.02).summaries()
    both = [
        msgspec.structs.replace(one, launches=[*one.launches, *other.launches])
        for one, other in zip(whole, part, strict=False)
    ]
    assert [one.rank for one in judge([*both, *whole[2:]]).slow] == [2]


def test_gradient_accumulation_counts_the_whole_step_and_shapes_that_change_each_step_say_nothing() -> None:
    # One all-reduce after eight micro batches: the step is long, and an eighth of it is little.
    assert named(Made(delay=of_rank(1, 0.07 * STEP_S), buckets=["all_reduce 5"])) == []
    changing = Made(buckets=["all_gather 1"], delay=of_rank(1, STEP_S)).summaries()
    kinds = [f"all_gather {number}" for number in range(60)]
    odd = [
        msgspec.structs.replace(
            one, kinds=kinds, launches=[msgspec.structs.replace(one.launches[0], kinds=[*range(60)])]
        )
        for one in changing
    ]
    assert judge(odd).unknown == "the collectives do not repeat in steps"


def test_without_a_worker_server_or_alone_nothing_is_reported_and_nothing_breaks(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    probe = RankProbe(path=tmp_path / "missing")
    reporter = Reporter(run=run, attempt=0, rank=0, world_size=1, node="n", probe=probe)
    reporter.start()
    with pytest.raises(NoAnswerError):
        reporter.report(1)
    assert not run.launches(0, 0).exists()
    assert not judge([]).is_known
    assert not judge(Made(world_size=1).summaries()).is_known


def test_a_record_of_another_pytorch_is_refused_and_odd_entries_are_left_out() -> None:
    for odd in (b"", b"[]", b'{"entries": 3}', b'{"entries": [{"time": 1}]}', b"\xff"):
        with pytest.raises(ValueError, match="flight record"):
            read_launches(odd)
    assert read_launches(b'{"version": "9", "pg_config": {}}') == ([], [])


def test_reports_of_a_run_that_are_missing_torn_or_old_name_nobody_wrongly(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), SlowRankMonitor(run=RunDir(tmp_path), attempt=0, world_size=4)
    assert monitor.look() == []
    summaries: list[Summary] = Made(num_steps=120, delay=of_rank(3, 0.5 * STEP_S)).summaries()
    for one in summaries:
        write_summary(run, 0, one)
    run.launches(0, 1).write_bytes(run.launches(0, 1).read_bytes()[:100])
    write_summary(run, 0, msgspec.structs.replace(summaries[2], turn=3))

    [alarm] = monitor.look()

    assert (alarm.rank, alarm.num_waiting) == (3, 3)
    monitor.close()
