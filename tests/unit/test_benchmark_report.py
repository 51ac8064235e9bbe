"""What the tables of measurements say of their rounds."""

from __future__ import annotations

import pytest

from benchmarks.report import tables
from benchmarks.rounds import MIN_ROUNDS, judge


@pytest.mark.parametrize(("num_rounds", "is_interval"), [(2, False), (MIN_ROUNDS - 1, False), (MIN_ROUNDS, True)])
def test_few_rounds_are_told_by_their_least_and_most(num_rounds: int, is_interval: bool) -> None:
    values = [float(number) for number in range(num_rounds)]

    between = judge("a claim", values).between

    assert (between != (values[0], values[-1])) == is_interval


def test_the_heading_says_which_of_the_two_stands_below() -> None:
    texts = tables()

    assert "least and most" in texts["survival"]
    assert "95 %" not in texts["survival"]
    assert "95 % between" in texts["loop"]
