"""Axes have few, round numbers."""

from __future__ import annotations

import pytest

from ddp_hpc.watch.report.axes import clock_times, compact, linear, logarithmic


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
    assert [tick.text for tick in linear(low, high).ticks] == texts


@pytest.mark.parametrize("value", [0.0, 1.0, -5.0, 1e-12, 1e300])
def test_an_axis_for_one_value_has_it_inside(value: float) -> None:
    axis = linear(value, value)

    assert 0.0 <= axis.place(value) <= 1.0
    assert axis.high > axis.low


@pytest.mark.parametrize("high", [0.2, 5.0, 1e3, 1e12])
def test_a_logarithmic_axis_has_two_to_nine_marks_in_order(high: float) -> None:
    ticks = logarithmic(0.1 / 1.15, high * 1.15).ticks

    places = [tick.at for tick in ticks]
    assert 2 <= len(ticks) <= 9
    assert places == sorted(places)


@pytest.mark.parametrize("length_s", [0.0, 3.0, 95.0, 4_000.0, 90_000.0, 5e6, 1e8])
def test_an_axis_of_times_has_few_marks_for_a_minute_and_for_years(length_s: float) -> None:
    axis = clock_times(1_750_000_000.0, 1_750_000_000.0 + length_s)

    assert len(axis.ticks) <= 7
    assert all(0.0 <= tick.at <= 1.0 for tick in axis.ticks)


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
