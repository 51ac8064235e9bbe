"""Axes have few, round numbers."""

from __future__ import annotations

import pytest

from ddp_hpc.watch.report.axes import axis, clock_axis
from ddp_hpc.watch.report.words import compact


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.0, 750.0, ["0", "200", "400", "600"]),
        (0.0, 1.0, ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (-3.0, 3.0, ["-2", "0", "2"]),
        (0.0, 2_000_000.0, ["0", "500k", "1M", "1.5M", "2M"]),
    ],
)
def test_a_linear_axis_has_round_numbers(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in axis([low, high], margin=0.0, count=5).ticks] == texts


@pytest.mark.parametrize("value", [0.0, 1.0, -5.0, 1e-12, 1e300])
def test_an_axis_for_one_value_has_it_inside(value: float) -> None:
    found = axis([value])

    assert 0.0 <= found.place(value) <= 1.0
    assert found.high > found.low


@pytest.mark.parametrize("high", [3.0, 5.0, 1e3, 1e12])
def test_a_logarithmic_axis_has_two_to_nine_marks_in_order(high: float) -> None:
    found = axis([0.1, high], may_be_log=True)

    ticks, places = found.ticks, [at for at, _ in found.ticks]
    assert found.is_log
    assert 2 <= len(ticks) <= 9
    assert places == sorted(places)


@pytest.mark.parametrize("length_s", [0.0, 3.0, 95.0, 4_000.0, 90_000.0, 5e6, 1e8])
def test_an_axis_of_times_has_few_marks_for_a_minute_and_for_years(length_s: float) -> None:
    found = clock_axis(1_750_000_000.0, 1_750_000_000.0 + length_s)

    assert len(found.ticks) <= 7
    assert all(0.0 <= at <= 1.0 for at, _ in found.ticks)


def test_numbers_are_short() -> None:
    assert [compact(one) for one in (0.0, 0.05, 1200.0, 25_000.0, 1.5e6, 3e-7, -12.5)] == [
        "0",
        "0.05",
        "1200",
        "25k",
        "1.5M",
        "3e-07",
        "-12.5",
    ]
