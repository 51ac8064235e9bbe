"""From what nodes saw of an all-reduce to the node or the link that is to blame."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from ddp_hpc.node_checks.collectives import (
    ALL,
    DONE,
    ENDING,
    IMPORTING,
    JOINING,
    Exchange,
    NodeReport,
    findings_of,
    report_of,
)
from ddp_hpc.run_dir.preflight import Finding

NODES = ("n0", "n1", "n2", "n3")
Pair = tuple[str, str]


def reports(
    *, wrong: frozenset[Pair] = frozenset(), rates: Mapping[Pair, float] | None = None, whole_wrong: int = 0
) -> dict[str, NodeReport]:
    def pairs(node: str) -> dict[str, Exchange]:
        own = [pair for pair in combinations(NODES, 2) if node in pair]
        return {
            next(one for one in pair if one != node): Exchange(
                mb_per_s=(rates or {}).get(pair, 1000.0), num_wrong=5 * (pair in wrong)
            )
            for pair in own
        }

    whole = Exchange(mb_per_s=500.0, num_wrong=whole_wrong)
    return {node: NodeReport(backend="gloo", stage=DONE, whole=whole, pairs=pairs(node)) for node in NODES}


def finding(found: Mapping[str, NodeReport], nodes: tuple[str, ...] = NODES) -> Finding:
    (only,) = findings_of(nodes, found)
    return only


def test_right_sums_on_equal_links_are_well() -> None:
    found = finding(reports())

    assert (found.level, found.nodes) == ("ok", ())
    assert "right on all 4 nodes by gloo: 500 MB/s with all nodes, 1000 to 1000 MB/s with two nodes" in found.found


def test_a_node_all_of_whose_pairs_have_wrong_sums_is_named() -> None:
    wrong = frozenset({("n0", "n2"), ("n1", "n2"), ("n2", "n3")})

    found = finding(reports(wrong=wrong, whole_wrong=5))

    assert (found.level, found.nodes) == ("fail", ("n2",))


@pytest.mark.parametrize("wrong", [{("n0", "n2")}, {("n0", "n2"), ("n1", "n3")}, set(), {*combinations(NODES, 2)}])
def test_wrong_sums_that_are_not_those_of_one_node_name_none(wrong: set[Pair]) -> None:
    found = finding(reports(wrong=frozenset(wrong), whole_wrong=5))

    assert (found.level, found.nodes) == ("fail", ())


def test_a_node_all_of_whose_links_are_slow_is_a_warning_that_names_it() -> None:
    found = finding(reports(rates={("n0", "n2"): 10.0, ("n1", "n2"): 9.0, ("n2", "n3"): 11.0}))

    assert (found.level, found.nodes) == ("warn", ("n2",))
    assert "the slowest pair is n1 - n2, the slowest node n2" in found.found


def test_one_slow_pair_names_no_node() -> None:
    found = finding(reports(rates={("n0", "n2"): 10.0}))

    assert (found.level, found.nodes) == ("warn", ())
    assert "the slowest pair is n0 - n2" in found.found


@pytest.mark.parametrize(
    ("stages", "named"),
    [
        ({"n0": JOINING, "n1": JOINING, "n3": JOINING}, ("n2",)),  # it never reported
        ({"n0": JOINING, "n1": JOINING, "n2": IMPORTING, "n3": JOINING}, ("n2",)),
        ({"n0": JOINING, "n1": JOINING, "n2": IMPORTING, "n3": IMPORTING}, ()),
        ({"n0": ALL, "n1": ALL, "n2": JOINING, "n3": ALL}, ("n2",)),  # it does not reach the others
        ({"n0": ALL, "n1": ALL, "n3": ALL}, ("n2",)),
        ({"n0": ALL, "n1": ALL, "n2": ALL, "n3": ALL}, ()),
        ({"n0": JOINING}, ()),
    ],
)
def test_who_did_not_come_is_named_where_most_did(stages: dict[str, str], named: tuple[str, ...]) -> None:
    found = finding({node: NodeReport(backend="gloo", stage=stage) for node, stage in stages.items()})

    assert (found.level, found.nodes) == ("fail", named)


def test_an_error_of_the_back_end_is_told() -> None:
    broken = NodeReport(backend="nccl", stage=ALL, error="DistBackendError: NCCL error: unhandled cuda error")

    found = finding({**reports(), "n1": broken})

    assert "n1: DistBackendError: NCCL error" in found.found


def test_without_reports_nothing_is_known() -> None:
    (found,) = findings_of(NODES, {}, problem="srun: error: Unable to create step")

    assert (found.level, "Unable to create step" in found.found) == ("unknown", True)


def test_a_report_survives_the_way_through_json() -> None:
    report = reports()["n1"]

    assert report_of(json.loads(json.dumps(report.as_record))) == report


@pytest.mark.parametrize("plain", [None, {}, {"pairs": 1}, {"pairs": {}, "whole": {"x": 1}, "stage": "done"}])
def test_what_is_no_report_is_not_taken_for_one(plain: Any) -> None:
    assert report_of(plain) is None


def test_exchanges_of_one_node_that_came_to_no_end_name_it_with_what_was_measured() -> None:
    kept = {
        node: replace(
            report,
            pairs={other: one for other, one in report.pairs.items() if "n2" not in (node, other)},
            failed={other: "RuntimeError: Timed out" for other in report.pairs if "n2" in (node, other)},
        )
        for node, report in reports().items()
    }

    found = finding(kept)

    assert (found.level, found.nodes) == ("fail", ("n2",))
    assert "did not finish: n0 - n2; n1 - n2; n2 - n3 (RuntimeError: Timed out)" in found.found
    assert "measured: 3 of 6 pairs, 1000 to 1000 MB/s, the slowest is n0 - n1" in found.found


def test_what_was_measured_before_the_time_was_over_is_told() -> None:
    late = replace(reports()["n0"], stage="the all-reduce with n1", pairs={"n2": Exchange(mb_per_s=0.2)})
    whole = {
        **{node: replace(one, stage="the all-reduce with n0", pairs={}) for node, one in reports().items()},
        "n0": late,
    }

    found = finding(whole)

    assert (found.level, found.nodes) == ("fail", ())
    assert "n0: was not done in time with the all-reduce with n1" in found.found
    assert "measured: 1 of 6 pairs, 0.2 to 0.2 MB/s, the slowest is n0 - n2; not measured: " in found.found


def test_the_exchange_of_all_nodes_alone_came_to_no_end() -> None:
    found = finding(
        {node: replace(one, whole=None, failed={"": "RuntimeError: late"}) for node, one in reports().items()}
    )

    assert (found.level, found.nodes) == ("fail", ())
    assert found.found.startswith(
        "the all-reduce of all nodes together did not end, though that of each pair did (RuntimeError: late); measured: 6 of 6"
    )
    assert "leave out" not in found.to_do


def test_a_pair_that_ended_on_one_side_only_is_not_a_measured_one() -> None:
    """The last message reached one of them, and the confirmation did not reach the other."""
    whole = reports()
    rest = {node: one for node, one in whole["n1"].pairs.items() if node != "n0"}
    found = finding({**whole, "n1": replace(whole["n1"], pairs=rest, failed={"n0": "RuntimeError: late"})})

    assert "did not finish: n0 - n1 (RuntimeError: late); measured: 5 of 6 pairs" in found.found
    assert "not measured: n0 - n1" in found.found


@pytest.mark.parametrize(("late", "told"), [(("n2",), "leave out n2, or ask"), (NODES, "ask your cluster's support")])
def test_only_nodes_that_are_named_are_to_be_left_out(late: tuple[str, ...], told: str) -> None:
    stages = {node: IMPORTING if node in late else JOINING for node in NODES}

    found = finding({node: NodeReport(backend="gloo", stage=stage) for node, stage in stages.items()})

    assert found.to_do.startswith(told)


def test_wrong_sums_of_no_single_node_have_none_left_out() -> None:
    assert "leave out" not in finding(reports(wrong=frozenset({("n0", "n2"), ("n1", "n3")}))).to_do
    every = frozenset({("n0", "n2"), ("n1", "n2"), ("n2", "n3")})
    assert "leave out n2, and tell" in finding(reports(wrong=every)).to_do


def test_nodes_that_wait_for_the_end_of_the_others_say_so() -> None:
    found = finding({node: replace(one, stage=ENDING) for node, one in reports().items()})

    assert (
        "n0: did all of its own exchanges, but did not learn in time that the other nodes had done theirs"
        in found.found
    )
