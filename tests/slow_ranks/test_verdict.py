"""Which rank is named, and when none is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ddp_hpc.cluster.slow_ranks.judge import judge
from ddp_hpc.cluster.slow_ranks.launches import Launches
from ddp_hpc.cluster.slow_ranks.step_starts import step_starts
from ddp_hpc.cluster.slow_ranks.summary import ClockOffset, Phases, RankReport, read_report, write_report
from ddp_hpc.run.run_dir.paths import RunDir
from tests.slow_ranks.made_launches import STEP_S, Made, of_rank


def named(made: Made) -> list[int]:
    return [one.rank for one in judge(made.summaries()).slow]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("share", [0.2, 1.0, 10.0])
def test_the_rank_that_is_late_in_each_step_is_named_with_what_it_costs(world_size: int, share: float) -> None:
    made = Made(world_size=world_size, delay=of_rank(1, share * STEP_S), noise_s=0.02 * STEP_S, now_and_then=7)

    verdict = judge(made.summaries())

    [slow] = verdict.slow
    assert slow.rank == 1
    assert slow.num_waiting == world_size - 1
    assert slow.lost_s == pytest.approx(share * STEP_S, abs=0.05 * STEP_S)
    assert slow.share == pytest.approx(share / (1 + share), abs=0.05)
    assert verdict.num_steps >= 20


def test_no_rank_is_named_for_less_than_a_tenth_of_the_step_or_in_fewer_than_twenty_steps() -> None:
    assert named(Made(delay=of_rank(1, 0.08 * STEP_S))) == []
    assert named(Made(delay=of_rank(1, STEP_S), num_steps=20)) == []
    assert "fewer than 20 steps" in judge(Made(num_steps=20).summaries()).unknown
    assert named(Made(delay=of_rank(1, STEP_S), num_steps=22)) == [1]


@pytest.mark.parametrize("noise", [0.05, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("world_size", [2, 4, 64])
def test_ranks_that_are_late_in_turn_are_not_named(noise: float, world_size: int) -> None:
    assert named(Made(world_size=world_size, noise_s=noise * STEP_S)) == []


def test_a_rank_that_is_late_only_now_and_then_is_not_named() -> None:
    # Rank zero evaluates, writes logs and saves alone.
    assert named(Made(delay=lambda rank, step: 3 * STEP_S if rank == 0 and step % 5 == 0 else 0.0)) == []


@pytest.mark.parametrize(
    "made",
    [
        Made(buckets=["all_reduce 400"]),
        Made(buckets=["all_reduce 400"] * 12),
        Made(buckets=["all_reduce 1", *["all_reduce 400"] * 18, "all_reduce 2"], now_and_then=3),
        Made(after=["all_reduce loss", "barrier"]),
        Made(buckets=["all_reduce 400"], now_and_then=2),
        Made(buckets=["all_reduce 400"], now_and_then=3),
        Made(buckets=["all_reduce 1", *["all_reduce 400"] * 4], now_and_then=2),
        Made(buckets=["all_reduce 1", "all_reduce 2", "all_reduce 1", "all_reduce 3"], now_and_then=10),
        Made(evaluation_s=300.0),
    ],
    ids=[
        "one bucket",
        "alike",
        "many buckets",
        "a loss each step",
        "one and a half",
        "one and a third",
        "four alike",
        "twice a step",
        "an evaluation",
    ],
)
def test_the_share_is_that_of_a_step_however_many_collectives_a_step_has(made: Made) -> None:
    made.delay = of_rank(2, 0.5 * STEP_S)

    [slow] = judge(made.summaries()).slow

    assert slow.rank == 2
    assert slow.share == pytest.approx(1 / 3, abs=0.06)


@pytest.mark.parametrize(("every", "found"), [(5, [2]), (1, [])])
def test_a_reduce_that_comes_now_and_then_hides_no_slow_rank(every: int, found: list[int]) -> None:
    made = Made(num_steps=300, now_and_then=every, extra="reduce loss", delay=of_rank(2, 0.5 * STEP_S))

    assert named(made) == found


def test_a_small_delay_is_not_counted_once_for_each_bucket_of_a_step() -> None:
    buckets = ["all_reduce 1", *["all_reduce 400"] * 10, "all_reduce 2"]
    assert named(Made(buckets=buckets, delay=of_rank(2, 0.05 * STEP_S))) == []


def test_clocks_that_differ_between_nodes_are_set_right_and_a_difference_within_their_error_names_nobody() -> None:
    nodes = ["a", "a", "b", "b"]
    known = {"b": ClockOffset(60.0, 0.001)}
    assert named(Made(nodes=nodes, ahead_s={"b": 60.0}, clocks=known)) == []
    assert named(Made(nodes=nodes, ahead_s={"b": 60.0}, clocks=known, delay=of_rank(3, 0.03))) == [3]
    # The true difference is 60.02 s, which both ranks of the node seem to be late. The error says that it may be.
    off = {"b": ClockOffset(60.0, 0.02)}
    assert named(Made(nodes=nodes, ahead_s={"b": 60.02}, clocks=off)) == []


def test_where_clocks_were_not_compared_only_ranks_of_one_node_are() -> None:
    nodes = ["a", "a", "a", "b"]
    assert named(Made(nodes=nodes, ahead_s={"b": 60.0})) == []
    assert named(Made(nodes=nodes, ahead_s={"b": 60.0}, delay=of_rank(2, 0.05))) == [2]
    assert "clocks" in judge(Made(nodes=["a", "b", "c", "d"]).summaries()).unknown


def test_windows_that_overlap_in_part_are_judged_where_they_do_and_others_are_not() -> None:
    [first, *others] = Made(num_steps=100, delay=of_rank(0, 0.05)).summaries()

    def cut(summary: RankReport, start: int, end: int) -> RankReport:
        [one] = summary.launches
        part = Launches(one.group, one.seqs[start:end], one.kinds[start:end], one.at_us[start:end])
        return msgspec.structs.replace(summary, launches=[part])

    assert [one.rank for one in judge([cut(first, 31, 300), *(cut(one, 0, 200) for one in others)]).slow] == [0]
    apart = judge([cut(first, 150, 300), *(cut(one, 0, 150) for one in others)])
    assert apart.unknown
    assert "in common" in apart.unknown
    # Of another look, in which a rank reported other collectives, or none: nothing is known of the whole.
    late = msgspec.structs.replace(others[-1], turn=6)
    assert "reported again" in judge([first, *others[:-1], late]).unknown
    assert "not all ranks" in judge([first, *others[:-1]]).unknown


def test_ranks_that_call_different_collectives_are_not_compared() -> None:
    [first, *others] = Made(delay=of_rank(0, 0.05)).summaries()
    strange = msgspec.structs.replace(first, kinds=[kind + " of another program" for kind in first.kinds])
    assert judge([strange, *others]).unknown


@pytest.mark.parametrize("phase", ["data", "forward", "optimizer", "backward"])
def test_a_phase_is_named_as_the_cause_where_it_explains_the_wait(phase: str) -> None:
    base = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.01}

    def phases(rank: int) -> Phases:
        # The others wait in their backward pass, for as long as rank one takes longer anywhere.
        own = dict(base)
        own["backward" if rank != 1 else phase] += 0.05
        return Phases(num_steps=10, seconds={name: 10 * seconds for name, seconds in own.items()})

    [slow] = judge(Made(delay=of_rank(1, 0.05), phases=phases).summaries()).slow

    assert slow.cause == phase


def test_no_cause_is_named_where_two_phases_share_the_wait_or_phases_and_wait_do_not_agree() -> None:
    def phases(rank: int, *, data: float, forward: float) -> Phases:
        return Phases(
            num_steps=1, seconds={"data": data * (rank == 1), "forward": forward * (rank == 1), "backward": 0}
        )

    def cause(**own: float) -> str:
        [slow] = judge(Made(delay=of_rank(1, 0.05), phases=lambda rank: phases(rank, **own)).summaries()).slow
        return slow.cause

    assert cause(data=0.025, forward=0.025) == ""
    assert cause(data=0.5, forward=0.0) == ""
    assert cause(data=0.045, forward=0.005) == "data"


def test_a_report_comes_back_as_it_was_written_and_is_small(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    summary = Made(num_steps=330, now_and_then=5).summaries()[2]
    assert len(summary.launches[0].seqs) > 1000

    write_report(run, 3, summary)

    assert read_report(run.launches(3, 2)) == summary
    assert run.launches(3, 2).stat().st_size < 13_000
    assert read_report(run.launches(3, 1)) is None
    run.launches(3, 2).write_text('{"rank": 2')
    assert read_report(run.launches(3, 2)) is None


def test_the_steps_of_our_own_loop_are_found_among_votes_to_stop_that_come_after_every_one_or_two_steps() -> None:
    # As it was recorded of a loop with steps of 0.2 s: 4 are gradients, 3 votes to stop, 7 another exchange in the same step.
    text = "4334433443474734474347443347433433433474343343344743347443343343343343"
    kinds, now, times = [int(one) for one in text], 0.0, []
    for kind in kinds:
        now += 0.2 if kind == 4 else 0.02
        times.append(now)

    starts = step_starts(kinds, times)

    assert [kinds[index] for index in starts] == [4] * text.count("4")


def test_a_sequence_that_does_not_repeat_has_no_steps() -> None:
    assert step_starts([*range(40)], [float(one) for one in range(40)]) == []
    assert step_starts([], []) == []
