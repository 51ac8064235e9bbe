"""Who hangs, by the stacks of all ranks, what the network carries, and what the ranks' collectives show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ddp_hpc.cluster.rank_probe.hang_verdict import RankStack, judge_hang, straggler
from ddp_hpc.run.run_dir.failure_reports import HangKind
from ddp_hpc.run.run_dir.network import NetworkFindings, PairFault
from tests.unit.test_compare_ranks import BEFORE, OPEN, OWN, rank

WAITS = ("/torch/distributed/distributed_c10d.py:2501 in all_reduce", "loop.py:30 in train")
WORKS = ("/data/photos.py:12 in __getitem__", "loop.py:20 in train")
IN_C: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("places", "world_size", "found"),
    [
        ([WAITS, WORKS, WAITS], 3, (1, "is in /data/photos.py:12 in __getitem__")),
        ([WAITS, None, WAITS], 3, (1, "did not print its stack: the process is stopped, or its node has no network")),
        ([WORKS, None, WAITS], 3, (1, "did not print its stack: the process is stopped, or its node has no network")),
        ([WAITS, IN_C], 2, (1, "is in code without a Python frame")),
        ([WAITS, WAITS], 2, None),
        ([WORKS, WORKS], 2, None),
        ([None, None, WAITS], 3, None),
        ([WORKS, WORKS, None, None], 4, None),
        ([None, None, WORKS, WAITS], 4, (2, "is in /data/photos.py:12 in __getitem__")),
        ([WORKS], 1, (0, "is in /data/photos.py:12 in __getitem__")),
        ([WAITS], 1, (0, f"is in {WAITS[0]}")),
        ([None], 1, (0, "did not print its stack: the process is stopped, or its node has no network")),
    ],
    ids=[
        "one works, the others wait",
        "one says nothing",
        "one says nothing, another works",
        "one stands in C",
        "all wait for each other",
        "all work",
        "several say nothing, one waits",
        "several say nothing, the others work",
        "several say nothing, one works",
        "alone",
        "alone in a collective",
        "alone and silent",
    ],
)
def test_the_laggard_is_who_does_not_wait_or_the_only_one_that_is_silent(
    places: list[tuple[str, ...] | None], world_size: int, found: tuple[int, str] | None
) -> None:
    stands = [RankStack(rank, place, "") for rank, place in enumerate(places) if place is not None]

    assert straggler(stands, world_size) == found


def test_who_lost_the_connection_to_one_that_was_bitten_before_is_not_the_silent_one() -> None:
    stands = [RankStack(1, WORKS, "")]

    assert straggler(stands, 2) == (0, "did not print its stack: the process is stopped, or its node has no network")
    assert straggler(stands, 2, lost_peer={0}) == (1, f"is in {WORKS[0]}")


def test_a_call_that_is_made_from_within_torch_far_up_the_stack_is_no_waiting() -> None:
    """A hook of the user's is called by the backward: he works, though the backward is below him."""
    frames = [f"/home/me/hook.py:{line} in compress" for line in range(4)]

    assert not RankStack(0, [*frames, "/torch/autograd/graph.py:7 in backward"], "").waits_for_others


def test_a_rank_that_waits_in_the_store_for_others_is_not_taken_for_the_one_they_wait_for() -> None:
    waits = ["/lib/ddp_hpc/train/sealed_store.py:40 in get", "/lib/ddp_hpc/train/state/restore.py:90 in restore"]
    stands = [RankStack(0, waits, ""), RankStack(1, ["/lib/ddp_hpc/checkpoint_store.py:9 in read"], "")]

    assert straggler(stands, 2) == (1, "is in /lib/ddp_hpc/checkpoint_store.py:9 in read")


# --- all that is known -----------------------------------------------------------------------------------------------

HOSTS = ("node1", "node2", "node3", "node4")
REDUCES, BROADCASTS = (f"/torch/distributed/c10d.py:{line} in {name}" for line, name in ((9, "reduce"), (5, "cast")))
FAULTY = NetworkFindings(
    at=0.0,
    seconds=3.0,
    address="10.2.0.1",
    num_nodes=4,
    num_pairs=6,
    pairs=(PairFault(nodes=("node1", "node3"), fault="one way"),),
)


@pytest.mark.parametrize(
    ("places", "network", "kind", "named"),
    [
        ([REDUCES, WORKS[0]], None, "behind", 1),
        ([REDUCES], None, "behind", 1),
        ([REDUCES, REDUCES.replace("9", "7")], None, "network", -1),
        ([REDUCES, BROADCASTS], None, "different", -1),
        ([WORKS[0], WORKS[0]], None, "", -1),
        ([], None, "", -1),
        ([REDUCES] * 4, FAULTY, "link", -1),
        ([REDUCES, REDUCES, None, REDUCES], FAULTY, "link", -1),  # node3's own link explains why it is silent
        ([REDUCES, REDUCES, REDUCES, None], FAULTY, "behind", 3),
        ([REDUCES, REDUCES, WORKS[0], REDUCES], FAULTY, "behind", 2),
    ],
)
def test_a_hang_is_judged_by_where_the_ranks_were_and_by_the_network(
    places: Sequence[str | None], network: NetworkFindings | None, kind: HangKind, named: int
) -> None:
    stands = [RankStack(number, [place], "") for number, place in enumerate(places) if place is not None]

    found, rank, words = judge_hang(HOSTS[: max(len(places), 2)], [], stands, network)

    assert (found, rank) == (kind, named)
    assert ("10.2.0.1" in words) is (network is not None)


def test_a_network_that_fails_explains_ranks_of_which_it_is_not_known_whether_they_wait() -> None:
    records = [rank(0, OPEN), rank(1, BEFORE, frames=OWN, line="request.wait()")]

    assert judge_hang(HOSTS[:2], records, [], None)[0] == ""
    assert judge_hang(HOSTS[:2], records, [], FAULTY)[0] == "link"
