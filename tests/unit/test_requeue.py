"""What follows an attempt, cause by cause; how failures without progress and failing nodes are counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_hpc.run.requeue import (
    RULES,
    Decision,
    DecisionInputs,
    bad_nodes,
    decide_next,
    lead_problem,
    num_without_progress,
)
from ddp_hpc.run.run_dir.ledger import Attempt, Cause, Ending, Next
from ddp_hpc.run.spec import RestartSpec
from tests.made_run import changed, made_attempt

POLICY = RestartSpec()
CAUSES = tuple(Cause)
BY_SUCCESSOR = RestartSpec(by="successor")
NEVER_IN_PLACE = RestartSpec(in_place=False)


def attempt(number: int = 0, **more: Any) -> Attempt:
    return made_attempt(number, **more)


# --- decisions -------------------------------------------------------------------------------------------------------


def test_every_cause_has_its_row() -> None:
    assert RULES.keys() == set(CAUSES)


@pytest.mark.parametrize(
    ("cause", "ending", "following", "without_slurm"),
    [
        ("finished", "finished", "", "finished"),
        ("refused", "refused", "", "refused"),
        ("cancelled", "cancelled", "", "cancelled"),
        ("fenced", "fenced", "", "fenced"),
        ("stop asked", "stopped", "", "stopped"),
        ("requeue asked", "stopped", "requeue", "stopped"),
        ("script asked", "stopped", "requeue", "stopped"),
        ("preempted", "stopped", "requeue", "stopped"),
        ("time limit", "stopped", "requeue", "stopped"),
        ("worker crashed", "failed", "in place", "failed"),
        ("hang", "failed", "in place", "failed"),
        ("node failed", "failed", "requeue", "failed"),
        ("diverged", "failed", "", "failed"),
        ("ranks differ", "failed", "in place", "failed"),
        ("not saved", "failed", "", "failed"),
        ("unexplained", "failed", "requeue", "failed"),
    ],
)
def test_each_cause_has_its_ending_and_what_follows(
    cause: Cause, ending: Ending, following: Next, without_slurm: Ending
) -> None:
    on_slurm = decide_next(DecisionInputs(cause=cause, num_without_progress=1), POLICY)
    here = decide_next(DecisionInputs(cause=cause, num_without_progress=1, is_on_slurm=False), POLICY)

    assert on_slurm == Decision(ending=ending, next=following)
    assert here == Decision(ending=without_slurm)


@pytest.mark.parametrize(
    ("count", "ending", "following"), [(0, "stopped", "in place"), (2, "stopped", "in place"), (3, "failed", "")]
)
def test_a_script_that_asks_for_it_is_started_again_without_slurm_until_it_makes_no_progress(
    count: int, ending: Ending, following: Next
) -> None:
    asked = DecisionInputs(cause=Cause.SCRIPT_ASKED, num_without_progress=count, is_on_slurm=False, is_supervised=True)

    decision = decide_next(asked, POLICY)

    assert (decision.ending, decision.next) == (ending, following)
    assert ("3 attempts in a row" in decision.why) == (not following)
    assert not decide_next(replace(asked, is_supervised=False), POLICY).next  # as under `ddp-hpc join`
    assert decide_next(replace(asked, is_on_slurm=True), POLICY).next == ("requeue" if following else "")


@pytest.mark.parametrize("cause", [Cause.WORKER_CRASHED, Cause.HANG])
def test_a_script_that_advances_is_started_again_without_slurm_too(cause: Cause) -> None:
    failed = DecisionInputs(cause=cause, is_on_slurm=False, is_supervised=True, goes_on_here=True)

    assert decide_next(failed, POLICY) == Decision(ending=Ending.FAILED, next=Next.IN_PLACE)
    for stays in (
        replace(failed, num_without_progress=1),
        replace(failed, goes_on_here=False),  # a recipe
        replace(failed, is_supervised=False),  # `ddp-hpc join`
    ):
        assert decide_next(stays, POLICY) == Decision(ending=Ending.FAILED)
    assert not decide_next(failed, replace(POLICY, in_place=False)).next


def test_ranks_that_differ_train_on_from_the_newest_checkpoint_without_slurm_too() -> None:
    differ = DecisionInputs(cause=Cause.RANKS_DIFFER, num_without_progress=2, is_on_slurm=False, is_supervised=True)

    assert decide_next(differ, POLICY).next == "in place"
    assert not decide_next(replace(differ, is_supervised=False), POLICY).next
    assert "3 attempts in a row" in decide_next(replace(differ, num_without_progress=3), POLICY).why


@pytest.mark.parametrize("is_on_slurm", [True, False])
def test_ranks_that_differ_twice_in_the_same_way_end_the_run(is_on_slurm: bool) -> None:
    again = DecisionInputs(cause=Cause.RANKS_DIFFER, differs_as=4, is_on_slurm=is_on_slurm, is_supervised=True)

    decision = decide_next(again, POLICY)

    assert (decision.ending, decision.next) == ("failed", "")
    assert "in attempt 4, each rank had the same values" in decision.why


def test_a_node_that_computed_something_wrong_is_left_out_at_once() -> None:
    wrong = attempt(1, failed_nodes=("node2",), cause=Cause.RANKS_DIFFER, ended_at=NOW - 60)

    assert bad_nodes([wrong], POLICY, now=NOW) == ["node2"]
    assert bad_nodes([changed(wrong, cause=Cause.HANG)], POLICY, now=NOW) == []


AWAY = [cause for cause, row in RULES.items() if row.next == Next.REQUEUE]
IN_PLACE = [cause for cause, row in RULES.items() if row.next == Next.IN_PLACE]
OVER = [cause for cause, row in RULES.items() if not row.next]


@pytest.mark.parametrize("cause", [*AWAY, *IN_PLACE])
def test_a_job_goes_back_as_a_new_one_where_the_user_wants_that(cause: Cause) -> None:
    decision = decide_next(DecisionInputs(cause=cause, may_requeue=False), replace(BY_SUCCESSOR, in_place=False))

    assert decision.next == "successor"


@pytest.mark.parametrize("cause", [*AWAY, *IN_PLACE])
def test_a_job_that_may_not_be_requeued_ends_and_says_why(cause: Cause) -> None:
    decision = decide_next(DecisionInputs(cause=cause, may_requeue=False), NEVER_IN_PLACE)

    assert decision.next == ""
    assert "`slurm.requeue` is false" in decision.why


@pytest.mark.parametrize("cause", IN_PLACE)
@pytest.mark.parametrize(
    ("bad", "policy", "following"),
    [((), POLICY, "in place"), (("node2",), POLICY, "requeue"), ((), NEVER_IN_PLACE, "requeue")],
    ids=["nodes in order", "a node that failed before", "not wanted"],
)
def test_workers_are_started_again_in_place_on_nodes_in_order(
    cause: Cause, bad: tuple[str, ...], policy: RestartSpec, following: Next
) -> None:
    decision = decide_next(DecisionInputs(cause=cause, bad_nodes=bad), policy)

    assert (decision.next, decision.exclude) == (following, bad)


@pytest.mark.parametrize(("count", "following"), [(0, "in place"), (1, "in place"), (2, "requeue")])
def test_where_nobody_says_why_twice_other_nodes_are_tried(count: int, following: Next) -> None:
    """A node that cannot start a process cannot have it say so."""
    situation = DecisionInputs(cause=Cause.WORKER_CRASHED, has_no_report=True, num_without_progress=count)

    assert decide_next(situation, POLICY).next == following
    assert decide_next(replace(situation, has_no_report=False), POLICY).next == "in place"


@pytest.mark.parametrize("cause", IN_PLACE)
def test_in_place_is_no_requeue_so_it_needs_no_leave(cause: Cause) -> None:
    assert decide_next(DecisionInputs(cause=cause, may_requeue=False), POLICY).next == "in place"


@pytest.mark.parametrize(
    ("cause", "failed", "bad", "excluded"),
    [
        ("node failed", ("node3",), (), ("node3",)),
        ("node failed", ("node3",), ("node1", "node3"), ("node1", "node3")),
        ("hang", ("node3",), ("node2",), ("node2",)),
        ("worker crashed", ("node3",), ("node3",), ("node3",)),
        ("preempted", (), (), ()),
        ("preempted", (), ("node2",), ("node2",)),
    ],
)
def test_a_lost_node_is_shunned_at_once_and_others_when_they_failed_too_often(
    cause: Cause, failed: tuple[str, ...], bad: tuple[str, ...], excluded: tuple[str, ...]
) -> None:
    assert decide_next(DecisionInputs(cause=cause, failed_nodes=failed, bad_nodes=bad), POLICY).exclude == excluded


@pytest.mark.parametrize("cause", CAUSES)
def test_what_slurm_has_requeued_is_not_requeued_twice(cause: Cause) -> None:
    situation = DecisionInputs(cause=cause, is_requeued_by_slurm=True, num_without_progress=99, may_requeue=False)

    decision = decide_next(situation, POLICY)

    assert decision.next == ("" if cause in OVER else "slurm")


@pytest.mark.parametrize("cause", [cause for cause, row in RULES.items() if row.is_failure])
@pytest.mark.parametrize("policy", [POLICY, BY_SUCCESSOR, NEVER_IN_PLACE], ids=["default", "successor", "not in place"])
def test_failures_without_progress_end_the_run_at_last(cause: Cause, policy: RestartSpec) -> None:
    decisions = [decide_next(DecisionInputs(cause=cause, num_without_progress=count), policy) for count in (1, 2, 3, 4)]

    assert [bool(decision.next) for decision in decisions] == [True, True, False, False]
    assert [decision.ending for decision in decisions[2:]] == ["failed", "failed"]
    assert (
        decisions[2].why
        == "3 attempts in a row ended without a new checkpoint, so the run ends (`restart.max_no_progress`); correct the cause, and submit the run again"
    )


@pytest.mark.parametrize("cause", ["preempted", "requeue asked"])
def test_what_the_cluster_does_is_not_counted(cause: Cause) -> None:
    assert decide_next(DecisionInputs(cause=cause, num_without_progress=99), POLICY).next == "requeue"


@pytest.mark.parametrize(
    ("cause", "ending"), [("node failed", "stopped"), ("time limit", "stopped"), ("hang", "failed")]
)
def test_workers_that_left_after_a_commit_have_stopped_whatever_happened_to_a_node(
    cause: Cause, ending: Ending
) -> None:
    assert decide_next(DecisionInputs(cause=cause, is_committed=True), POLICY).ending == ending


SITUATIONS = st.builds(
    DecisionInputs,
    cause=st.sampled_from(CAUSES),
    is_committed=st.booleans(),
    num_without_progress=st.integers(0, 9),
    is_on_slurm=st.booleans(),
    is_requeued_by_slurm=st.booleans(),
    failed_nodes=st.lists(st.sampled_from(["node1", "node2"]), unique=True),
    bad_nodes=st.lists(st.sampled_from(["node1", "node2"]), unique=True),
    may_requeue=st.booleans(),
)
POLICIES = st.builds(
    RestartSpec,
    max_no_progress=st.integers(1, 5),
    in_place=st.booleans(),
    by=st.sampled_from(["requeue", "successor"]),
)


@given(SITUATIONS, POLICIES)
def test_what_is_over_never_comes_back_and_what_comes_back_is_not_over(
    situation: DecisionInputs, policy: RestartSpec
) -> None:
    decision = decide_next(situation, policy)

    if situation.cause in OVER:
        assert decision == Decision(ending=RULES[situation.cause].ending)
    if decision.next:
        assert decision.ending in {"stopped", "failed"}
        assert decision.why == ""
    if decision.next == "in place":
        assert not situation.bad_nodes or not situation.is_on_slurm  # on one machine there is no other node
        assert decision.exclude == ()
    if decision.next == "requeue":
        assert situation.may_requeue
    if not situation.is_requeued_by_slurm:
        assert decision.next != "slurm"


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_steps", "causes", "newest_step", "count"),
    [
        ([0], ["worker crashed"], 0, 1),
        ([0], ["worker crashed"], 2, 0),
        ([0, 0, 0], ["worker crashed"] * 3, 0, 3),
        ([0, 4, 4], ["worker crashed"] * 3, 4, 2),
        ([0, 4, 4], ["worker crashed"] * 3, 6, 0),
        ([4, 4, 4], ["hang", "preempted", "worker crashed"], 4, 2),
        ([4, 4, 4], ["hang", "preempted", "preempted"], 4, 1),
        ([4, 4], [None, "worker crashed"], 4, 2),
        ([8, 6], ["worker crashed", "worker crashed"], 6, 2),
        ([], [], 0, 0),
    ],
    ids=[
        "the first fails at once",
        "it fails after a checkpoint",
        "three fail at once",
        "the first made one",
        "the last made one",
        "a preemption between two failures neither counts nor forgives",
        "a preemption after a failure",
        "one died without a word",
        "a checkpoint did not verify and was set aside",
        "no attempts",
    ],
)
def test_failures_in_a_row_without_a_new_checkpoint_are_counted(
    first_steps: list[int], causes: list[Cause | None], newest_step: int, count: int
) -> None:
    attempts = [
        attempt(number, first_step=step, cause=cause)
        for number, (step, cause) in enumerate(zip(first_steps, causes, strict=True))
    ]
    last = causes[-1] if causes and causes[-1] is not None else Cause.UNEXPLAINED

    assert num_without_progress(attempts, newest_step, last) == count


def test_the_newest_attempt_counts_by_the_cause_that_the_ledger_does_not_have_yet() -> None:
    attempts = [attempt(0, cause=None)]

    counts = {cause: num_without_progress(attempts, 0, cause) for cause in CAUSES}

    assert {cause for cause, count in counts.items() if count} == {
        cause for cause, row in RULES.items() if row.is_failure
    }


@pytest.mark.parametrize(
    ("failed_nodes", "count"),
    [
        ([("node1",), (), ()], 2),
        ([("node1",), (), (), ()], 3),
        ([("node1",), ("node2",), ()], 3),
    ],
    ids=["one was not begun", "two in a row were not begun", "two nodes failed"],
)
def test_an_attempt_that_was_not_begun_on_bad_nodes_counts_only_where_the_next_gets_them_again(
    failed_nodes: list[tuple[str, ...]], count: int
) -> None:
    *before, _ = [attempt(number, cause="node failed", failed_nodes=f) for number, f in enumerate(failed_nodes)]
    attempts = [*before, attempt(len(before), cause=None)]

    assert num_without_progress(attempts, 0, Cause.WORKER_CRASHED) == count


# --- nodes -----------------------------------------------------------------------------------------------------------

HOUR_S = 3600.0
NOW = 100 * HOUR_S


@pytest.mark.parametrize(
    ("failures", "policy", "bad"),
    [
        ([], POLICY, []),
        ([(["node1"], 1)], POLICY, []),
        ([(["node1"], 1), (["node1"], 2)], POLICY, ["node1"]),
        ([(["node1"], 1), (["node2"], 2)], POLICY, []),
        ([(["node2", "node1"], 1), (["node1", "node2"], 2)], POLICY, ["node1", "node2"]),
        ([(["node1"], 1)], RestartSpec(exclude_after=1), ["node1"]),
        ([(["node1"], 1), (["node1"], 23.9)], POLICY, ["node1"]),
        ([(["node1"], 1), (["node1"], 24.1)], POLICY, []),
        ([(["node1"], 1), (["node1"], 24.1)], RestartSpec(forget_h=48), ["node1"]),
    ],
)
def test_nodes_that_failed_too_often_are_known_until_that_is_forgotten(
    failures: list[tuple[list[str], float]], policy: RestartSpec, bad: list[str]
) -> None:
    attempts = [
        attempt(number, failed_nodes=tuple(nodes), ended_at=NOW - hours_ago * HOUR_S)
        for number, (nodes, hours_ago) in enumerate(failures)
    ]

    assert bad_nodes(attempts, policy, now=NOW) == bad


def test_a_failure_whose_time_nobody_wrote_is_forgotten() -> None:
    attempts = [attempt(number, failed_nodes=("node1",), ended_at=None) for number in range(5)]

    assert bad_nodes(attempts, POLICY, now=NOW) == []


# --- the warning before the time limit -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lead_s", "time_limit_min", "save_s", "told"),
    [
        (120, 60, None, None),
        (120, None, None, None),
        (120, 60, 50, None),
        (120, 60, 51, "Set it to 123 or more"),
        (5, 60, 0.001, "Set it to 8 or more"),
        (120, 3, None, "this leaves no time to train"),
        (120, 4, None, None),
        (120, 2, 51, "Set it to 123 or more"),
    ],
)
def test_a_warning_that_comes_too_late_or_too_early_is_told(
    lead_s: float, time_limit_min: float | None, save_s: float | None, told: str | None
) -> None:
    problem = lead_problem(lead_s=lead_s, time_limit_min=time_limit_min, save_s=save_s)

    assert problem is None if told is None else told in str(problem)


def test_the_worst_node_comes_first() -> None:
    failed = [attempt(n, ended_at=1.0, failed_nodes=nodes) for n, nodes in enumerate([("a", "b"), ("a", "b"), ("b",)])]

    assert bad_nodes(failed, POLICY, now=2.0) == ["b", "a"]
