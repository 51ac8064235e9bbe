"""Which rank was wrong, by what the ranks had: by vote, and by what another attempt found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.job.ending import blame
from ddp_hpc.run.run_dir.differences import (
    Difference,
    TensorSample,
    is_same_difference,
    judge_by_repetition,
    judge_by_vote,
    read_difference,
    read_differences,
    write_difference,
)
from ddp_hpc.run.run_dir.ledger import Attempt, Cause
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.replays import AttemptInputs
from ddp_hpc.train.comparable_attempts import what_differs
from tests.made_run import changed, made_attempt


def difference(digests: str, *, attempt: int = 0, kinds: str = "", values: Any = (), **more: Any) -> Difference:
    """Return a difference of ranks with these digests, one letter each, on these kinds of processors."""
    return Difference(
        attempt=attempt,
        step=50,
        digests=tuple(digests),
        hosts=tuple(f"node{rank + 1}" for rank in range(len(digests))),
        processors=tuple(kinds or "x" * len(digests)),
        tensors=("model/w",),
        num_tensors=1,
        samples=(TensorSample(tensor="model/w", places=(7,), values=tuple((value,) for value in values)),)
        if values
        else (),
        at=1.0,
        **more,
    )


def repeated(one: Difference, values: Any = (), *, digest: str = "-", **more: Any) -> Difference:
    """Return the difference as attempt 1 concludes on it."""
    return judge_by_repetition(one, 1, digest, {"model/w": values} if values else {}, **more)


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ("aab", (2,)),
        ("baa", (0,)),
        ("abcaa", (1, 2)),
        ("ab", ()),
        ("abc", ()),
        ("aabb", ()),
        ("aabc", ()),
    ],
)
def test_more_than_half_of_the_ranks_name_the_others(digests: str, odd: tuple[int, ...]) -> None:
    told = judge_by_vote(difference(digests))

    assert (told.odd_ranks, told.told_by) == (odd, "vote" if odd else "")


@pytest.mark.parametrize(("digests", "kinds"), [("aab", "xxy"), ("aabb", "xxyy"), ("aabc", "xxyz")])
def test_ranks_that_differ_by_their_processors_are_not_blamed(digests: str, kinds: str) -> None:
    told = judge_by_vote(difference(digests, kinds=kinds))

    assert told.odd_ranks == ()
    assert "may round differently" in told.blame


def test_a_rank_that_differs_from_others_on_its_kind_of_processor_is_blamed() -> None:
    assert judge_by_vote(difference("aabaa", kinds="xxxyy")).odd_ranks == (2,)


@pytest.mark.parametrize(
    ("values", "found", "odd"),
    [
        ((1.0, 3.0), 1.001, (1,)),
        ((3.0, 1.0), 1.001, (0,)),
        ((1.0, 3.0), 2.0, ()),
        ((1.0, 3.0), 1.2, ()),  # many steps later, the wrong rank may be the nearest by chance
        ((1.0, 1.0 + 2**-20), 1.0, ()),  # a few units in the last place
        ((1.0, 1.0000001), 5.0, ()),
        ((1.0, float("nan")), 1.0001, (1,)),
        ((1.0, float("nan")), 1.2, ()),
        ((float("inf"), 1.0), 1.0, (0,)),
        ((1.0, 1.0, 3.0, 3.0), 3.0, (0, 1)),
        ((0.0, 1e38), 1e-3, (1,)),
    ],
)
def test_another_attempt_names_the_ranks_that_are_far_from_what_it_finds(
    values: tuple[float, ...], found: float, odd: tuple[int, ...]
) -> None:
    told = repeated(difference("abcd"[: len(values)], values=values), [found])

    assert (told.odd_ranks, told.told_by, told.told_in) == (odd, "repetition" if odd else "undecided", 1)


def test_a_rank_that_is_near_at_some_places_only_is_not_cleared() -> None:
    some = TensorSample(tensor="model/w", places=(0, 1, 2), values=((1.0, 1.0, 1.0), (3.0, 3.0, 3.0)))
    found = replace(difference("ab"), samples=(some,))

    assert repeated(found, [1.0, 1.0, 1.0]).odd_ranks == (1,)
    assert repeated(found, [1.0, 1.0, 2.9]).told_by == "undecided"


def test_without_samples_nothing_is_decided() -> None:
    assert repeated(difference("ab")).told_by == "undecided"
    assert repeated(difference("ab", values=(1.0, 2.0))).told_by == "undecided"


@pytest.mark.parametrize(
    ("digests", "found", "odd", "who"),
    [
        ("ab", "b", (0,), "rank 0 on node1 was wrong (attempt 1 computed the step again)"),
        ("aab", "a", (2,), "rank 2 on node3 was wrong (2 of 3 ranks agree, and attempt 1 computed the step again)"),
        (
            "aab",
            "b",
            (0, 1),
            "rank 0 on node1, rank 1 on node2 were wrong (attempt 1 computed the step again, and its result equals that of the minority of ranks)",
        ),
        ("abc", "c", (0, 1), "and its result equals that of the minority of ranks"),
    ],
)
def test_a_rank_whose_digest_is_found_again_was_right_whatever_the_vote_said(
    digests: str, found: str, odd: tuple[int, ...], who: str
) -> None:
    told = repeated(judge_by_vote(difference(digests)), digest=found)

    assert (told.odd_ranks, told.told_by, told.told_in, told.is_open) == (odd, "repetition", 1, False)
    assert who in told.blame


def test_values_clearly_near_those_of_the_fewer_ranks_overrule_the_vote() -> None:
    voted = judge_by_vote(difference("aab", values=(3.0, 3.0, 1.0)))

    assert voted.odd_ranks == (2,)
    assert repeated(voted, [1.0005]).odd_ranks == (0, 1)


def test_a_vote_stands_where_the_repetition_does_not_tell() -> None:
    voted = judge_by_vote(difference("aab", values=(3.0, 3.0, 1.0)))

    told = repeated(voted, [1.5])

    assert (told.odd_ranks, told.told_by, told.told_in, told.is_open) == ((2,), "vote", 0, False)
    assert (
        "2 of 3 ranks agree; attempt 1 computed the step again without a difference, but its values cannot"
        in told.blame
    )


@pytest.mark.parametrize("digests", ["ab", "aab"])
def test_an_attempt_that_computed_with_something_else_tells_nothing(digests: str) -> None:
    one = judge_by_vote(difference(digests, values=(1.0, 3.0, 3.0)[: len(digests)]))

    told = repeated(one, [1.0], digest="b", not_comparable="attempt 0 had 3 ranks, it has 2")

    assert told.told_by == ("undecided" if digests == "ab" else "vote")
    assert not told.is_open
    assert "attempt 0 had 3 ranks, it has 2" in told.blame


def test_ranks_that_differ_by_their_processors_are_not_compared_with_an_attempt_on_one_of_them() -> None:
    assert not difference("aab", kinds="xxy").is_open
    assert difference("aab").is_open


def test_a_record_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first, second = judge_by_vote(difference("aab", values=(1.0, 1.0, float("inf")))), difference("ab", attempt=11)
    write_difference(run, second)
    write_difference(run, first)

    assert read_differences(run) == [first, second]
    for text in ("", "[]", "{}", '{"digests": ["a"], "hosts": [], "processors": []}'):
        run.difference(11).write_text(text)
        assert read_difference(run, 11) is None
    assert read_differences(run) == [first]


def test_a_record_of_a_version_that_also_compared_gradients_tells_nothing_of_the_weights(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_difference(run, difference("ab"))
    record = json.loads(run.difference(0).read_text())
    run.difference(0).write_text(json.dumps({**record, "of_gradients": True, "told_by": "itself"}))

    assert read_difference(run, 0) is None


INPUTS = AttemptInputs(attempt=0, world_size=2, config="train:\n  lr: 0.1\nslurm:\n  qos: low\n", code={"/a/m.py": "1"})


@pytest.mark.parametrize(
    ("more", "differs"),
    [
        ({}, ""),
        ({"config": "train:\n  lr: 1e-1\nslurm:\n  qos: high\nlog:\n  every_steps: 7\n", "code": {"/b/m.py": "1"}}, ""),
        ({"world_size": 4}, "the number of ranks differs: 2 and 4"),
        ({"config": "train:\n  lr: 0.2\n"}, "`train` of the configuration differs"),
        ({"config": "slurm: {}\n"}, "`train` of the configuration differs"),
        ({"config": "a: [\n"}, "the recorded configuration of one of the two attempts cannot be read"),
        ({"config": "text"}, "the recorded configuration of one of the two attempts cannot be read"),
        ({"code": {"/a/m.py": "2"}}, "the user's code differs"),
        ({"code": {}}, "the user's code differs"),
    ],
)
def test_attempts_compute_the_same_with_equal_data_settings_and_code(more: Any, differs: str) -> None:
    assert what_differs(INPUTS, replace(INPUTS, attempt=1, **more)) == differs


def test_what_is_not_recorded_is_not_taken_for_the_same() -> None:
    assert (
        what_differs(None, INPUTS)
        == what_differs(INPUTS, None)
        == "the inputs of one of the two attempts are not recorded"
    )


# --- what follows ----------------------------------------------------------------------------------------------------


def attempt(number: int, **more: Any) -> Attempt:
    return made_attempt(number, **{"nodes": ("node1", "node2"), "cause": Cause.RANKS_DIFFER, **more})


def test_the_node_of_a_wrong_rank_is_that_of_its_place() -> None:
    two_each = difference("aaba", odd_ranks=(2,))

    assert blame.odd_ranks_nodes(two_each, ("node1", "node2")) == ("node2",)
    assert blame.odd_ranks_nodes(two_each, ()) == ()  # this machine
    assert blame.odd_ranks_nodes(None, ("node1",)) == ()


def test_a_repetition_corrects_the_ledger_of_the_earlier_attempt() -> None:
    told = difference("ab", odd_ranks=(1,), told_by="repetition", told_in=1)
    attempts = [attempt(0), changed(attempt(1), cause=Cause.FINISHED)]

    assert blame.corrected_attempts(attempts, [told]) == [changed(attempts[0], failed_nodes=("node2",))]
    assert blame.corrected_attempts(blame.corrected_attempts(attempts, [told]), [told]) == []


def test_the_node_of_a_rank_that_lost_a_vote_and_was_right_is_readmitted() -> None:
    voted = judge_by_vote(difference("abb"))
    attempts = [attempt(0, nodes=voted.hosts, failed_nodes=("node1",))]

    assert blame.corrected_attempts(attempts, [voted]) == []
    found = repeated(voted, digest="a")
    assert blame.corrected_attempts(attempts, [found]) == [changed(attempts[0], failed_nodes=("node2", "node3"))]


def test_what_happens_twice_in_the_same_way_is_no_nodes_failure() -> None:
    attempts = [attempt(0, failed_nodes=("node1",)), attempt(1)]
    twice = [judge_by_vote(difference("baa")), judge_by_vote(difference("baa", attempt=1))]

    assert is_same_difference(*twice)
    assert blame.earlier_same_difference(twice, attempts, 1) == 0
    assert blame.earlier_same_difference(twice, attempts[1:], 1) is None  # before the user's newest submission
    assert blame.corrected_attempts(attempts, twice) == [attempt(0)]
    assert not is_same_difference(twice[0], difference("bca", attempt=1))
