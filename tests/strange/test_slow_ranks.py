"""Trainings in which it is not plain who waits for whom."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import msgspec
import pytest

from ddp_hpc.cluster.rank_probe.client import NoAnswerError, RankProbe
from ddp_hpc.cluster.slow_ranks.judge import judge
from ddp_hpc.cluster.slow_ranks.launches import read_launches
from ddp_hpc.cluster.slow_ranks.reporter import Reporter
from ddp_hpc.cluster.slow_ranks.summary import ClockOffset, RankReport, write_report
from ddp_hpc.job.slow_rank_monitor import SlowRankMonitor
from ddp_hpc.run.run_dir.paths import RunDir
from tests.slow_ranks.made_launches import STEP_S, Made, of_rank


def named(made: Made) -> list[int]:
    return [one.rank for one in judge(made.summaries()).slow]


def test_a_node_that_is_slower_by_nature_has_both_of_its_ranks_named() -> None:
    nodes = ["old", "old", *["new"] * 6]
    made = Made(world_size=8, nodes=nodes, clocks={"new": ClockOffset(0.0, 0.001)}, noise_s=0.005)
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
    assert judge([]).unknown
    assert judge(Made(world_size=1).summaries()).unknown


def test_a_record_of_another_pytorch_is_refused_and_odd_entries_are_left_out() -> None:
    for odd in (b"", b"[]", b'{"entries": 3}', b'{"entries": [{"time": 1}]}', b"\xff"):
        with pytest.raises(ValueError, match="flight record"):
            read_launches(odd)
    assert read_launches(b'{"version": "9", "pg_config": {}}') == ([], [])


def test_reports_of_a_run_that_are_missing_torn_or_old_name_nobody_wrongly(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), SlowRankMonitor(run=RunDir(tmp_path), attempt=0, world_size=4)
    assert monitor.judge_reports() == []
    summaries: list[RankReport] = Made(num_steps=120, delay=of_rank(3, 0.5 * STEP_S)).summaries()
    for one in summaries:
        write_report(run, 0, one)
    run.launches(0, 1).write_bytes(run.launches(0, 1).read_bytes()[:100])
    write_report(run, 0, msgspec.structs.replace(summaries[2], turn=3))

    assert monitor.judge_reports() == []
    # All have reported, and again. A look that has been judged does not count twice.
    for one in summaries:
        write_report(run, 0, one)
    assert monitor.judge_reports() == monitor.judge_reports() == []
    for one in summaries:
        write_report(run, 0, msgspec.structs.replace(one, turn=8))
    [alarm] = monitor.judge_reports()
    assert (alarm.rank, alarm.num_waiting) == (3, 3)
    # Ranks that report no more are not as fast as the others.
    for turn in range(9, 14):
        for one in summaries[:3]:
            write_report(run, 0, msgspec.structs.replace(one, turn=turn))
        assert monitor.judge_reports() == []
    monitor.close()


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 4), (4, 8), (8, 8)])
def test_the_stages_of_a_pipeline_that_meet_once_a_step_are_not_slow(stages: int, micro_batches: int) -> None:
    # Each stage ends its last backward pass one turn before the stage in front of it.
    backward_s = STEP_S / (micro_batches + stages)
    made = Made(world_size=stages, buckets=["all_reduce 1"], noise_s=0.01 * backward_s)
    made.delay = lambda rank, _: (stages - rank) * backward_s
    assert named(made) == []
    assert "pipeline" in judge(made.summaries()).unknown


@pytest.mark.parametrize("name", ["gloo:reduce", "gloo:gather", "gloo:broadcast", "gloo:scatter", "nccl:all_reduce"])
def test_collectives_in_which_not_every_host_waits_for_all_name_nobody(name: str) -> None:
    made = Made(buckets=[f"{name} 9"], delay=of_rank(0, 0.4 * STEP_S))
    assert "each waits for all" in judge(made.summaries()).unknown
    assert named(Made(buckets=["gloo:all_reduce 9"], delay=of_rank(0, 0.4 * STEP_S))) == [0]


def test_where_one_rank_waits_for_another_before_all_meet_the_rank_that_waited_is_not_named() -> None:
    # Rank zero gathers from rank three, which is slow; then all reduce.
    made = Made(world_size=8, buckets=["gloo:gather 1", "gloo:all_reduce 9"])
    made.delay = lambda rank, _: 0.4 * STEP_S if rank in (0, 3) else 0.0
    assert named(made) == []
    made.buckets = ["gloo:broadcast 1", "gloo:all_reduce 9"]  # of DDP's buffers, say
    assert sorted(named(made)) == [0, 3]


def test_point_to_point_messages_in_each_step_say_nothing_of_who_is_slow() -> None:
    entries = []
    for step in range(60):
        for number, name in enumerate(["gloo:recv", "gloo:all_reduce"]):
            entries.append(
                {
                    "collective_seq_id": step + 1,
                    "time_created_ns": int(1e9 * (1 + STEP_S * step) + 1000 * number),
                    "profiling_name": name,
                    "process_group": ["0", "default_pg"],
                    "is_p2p": number == 0,
                }
            )
    kinds, launches = read_launches(msgspec.json.encode({"entries": entries}))
    both = [RankReport(rank=rank, world_size=2, node="a", turn=1, kinds=kinds, launches=launches) for rank in range(2)]
    assert "single other ranks" in judge(both).unknown


def test_ranks_that_do_not_wait_for_each_other_are_not_slow_by_more_than_a_step() -> None:
    made = Made(buckets=["all_reduce 1"])
    ahead = [
        msgspec.structs.replace(
            one,
            launches=[msgspec.structs.replace(one.launches[0], at_us=[at + 200_000 for at in one.launches[0].at_us])],
        )
        if one.rank == 0
        else one
        for one in made.summaries()
    ]
    assert "more than a step" in judge(ahead).unknown


def test_a_small_process_group_of_a_large_world_names_nobody() -> None:
    part = Made(world_size=2, group="3", delay=of_rank(1, 0.4 * STEP_S)).summaries()
    rest = [msgspec.structs.replace(part[0], rank=rank, launches=[]) for rank in range(2, 64)]
    assert judge([msgspec.structs.replace(one, world_size=64) for one in [*part, *rest]]).unknown


def test_a_half_of_the_ranks_that_is_late_as_after_a_step_of_a_clock_is_not_named() -> None:
    made = Made(world_size=8, delay=lambda rank, _: 0.3 * STEP_S * (rank >= 4))
    assert "half of the ranks" in judge(made.summaries()).unknown


def test_two_nodes_of_one_name_have_two_clocks() -> None:
    ahead = Made(world_size=4, nodes=["a", "a", "b", "b"], ahead_s={"b": 0.03}, clocks={"b": ClockOffset(0.03, 0.0005)})
    same = [msgspec.structs.replace(one, node="localhost", node_rank=one.rank // 2) for one in ahead.summaries()]
    assert not judge(same).unknown
    assert judge(same).slow == ()


def test_after_a_step_of_a_clock_its_error_is_as_large_as_the_step_until_the_launches_before_it_are_forgotten(
    tmp_path: Path,
) -> None:
    offsets = iter([0.0, 0.0, 0.05, 0.05])
    now = 1000.0
    reporter = Reporter(
        run=RunDir(tmp_path),
        attempt=0,
        rank=1,
        world_size=2,
        node="b",
        probe=RankProbe(path=tmp_path / "missing"),
        compare_clocks=lambda: ClockOffset(next(offsets), 0.001) if now < 1040 else None,
        clock=lambda: now,
    )
    found = []
    for at, oldest in [(1000, 990), (1010, 1000), (1020, 1005), (1030, 1025), (1040, 1030)]:
        now = float(at)
        reporter.compare()
        clock = reporter._clock_since(oldest)
        found.append(None if clock is None else round(clock.error_s, 6))
    assert found == [None, 0.001, 0.051, 0.001, None]


@pytest.mark.parametrize("world_size", [2, 3, 8, 9])
def test_the_cost_of_a_verdict_grows_no_faster_than_the_ranks(world_size: int) -> None:
    def num_sorts(number: int) -> int:
        found, summaries = [0], Made(world_size=number, noise_s=0.01).summaries()

        def count(_frame: object, event: str, what: object) -> None:
            found[0] += event == "c_call" and what is sorted

        sys.setprofile(count)
        try:
            judge(summaries)
        finally:
            sys.setprofile(None)
        return found[0]

    # Of each step and of each rank a few, and not of each step of each rank.
    assert num_sorts(world_size + 40) - num_sorts(world_size) < 40 * 10


def test_the_reports_of_an_attempt_are_removed_at_its_end_and_what_a_killed_writer_left(tmp_path: Path) -> None:
    run, monitor = RunDir(tmp_path), SlowRankMonitor(run=RunDir(tmp_path), attempt=0, world_size=2)
    for one in Made(world_size=2).summaries():
        write_report(run, 0, one)
    (run.attempt_logs(0) / ".rank-1.launches.json.77.tmp").write_text("")
    run.rank_log(0, 1).write_text("kept")
    monitor.start()
    monitor.close()
    assert [one.name for one in run.attempt_logs(0).iterdir()] == [run.rank_log(0, 1).name]


def test_a_rank_that_is_not_to_report_any_more_leaves_no_report_and_the_ranks_write_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankProbe, "flight_record_text", lambda _: b'{"entries": []}')
    waited: list[float] = []

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return self.is_set()

    for rank in range(3):
        probe = RankProbe(path=tmp_path / "unused")
        reporter = Reporter(run=RunDir(tmp_path), attempt=0, rank=rank, world_size=3, node="n", probe=probe)
        reporter._closing = Waits()
        if rank == 2:
            reporter.close()
        reporter.report(1)
    assert waited == sorted(set(waited))
    assert [RunDir(tmp_path).launches(0, rank).exists() for rank in range(3)] == [True, True, False]


def test_ranks_of_all_nodes_are_found_as_fast_as_the_others_where_only_those_of_one_node_can_be_compared() -> None:
    made = Made(world_size=6, nodes=["a"] * 3 + ["b"] * 3)
    assert judge(made.summaries()).clear == {*range(6)}
    made.delay = of_rank(4, 0.4 * STEP_S)
    assert judge(made.summaries()).clear == {0, 1, 2, 3, 5}
