"""What the tables of measurements say of their rounds."""

from __future__ import annotations

import pytest

from benchmarks import counters
from benchmarks.report import DOCUMENT, SENTENCES, charts, filled, results_in, summary, tables
from benchmarks.rounds import MIN_ROUNDS, Samples, added, judge


@pytest.mark.parametrize(("num_rounds", "is_interval"), [(2, False), (MIN_ROUNDS - 1, False), (MIN_ROUNDS, True)])
def test_few_rounds_are_told_by_their_least_and_most(num_rounds: int, is_interval: bool) -> None:
    values = [float(number) for number in range(num_rounds)]

    between = judge("a claim", values).between

    assert (between != (values[0], values[-1])) == is_interval


def test_the_heading_says_which_of_the_two_stands_below() -> None:
    texts = tables(results_in())

    assert "least and most" in texts["survival"]
    assert "95 %" not in texts["survival"]
    assert "95 % between" in texts["loop"]


def test_the_pages_figures_and_bars_are_those_of_the_results() -> None:
    """Else: `make bench ARGS=--tables`."""
    found = results_in()

    page = DOCUMENT.read_text()

    assert page == filled(page, tables(found))
    assert {path: path.read_text() for path in charts(found)} == charts(found)
    assert summary(found).count("\n- ") == len(SENTENCES) - 1


def test_events_are_counted_only_as_they_happen_and_where_the_machine_counts_them() -> None:
    """Few virtual machines count instructions; all count nanoseconds of CPU time, in the same way."""
    before = counters.count(counters.TASK_CLOCK)
    sum(range(200_000))
    after = counters.count(counters.TASK_CLOCK)

    if before is None or after is None:
        pytest.skip("perf_event_open(2) is not allowed here")
    assert 100_000 < after - before < 60_000_000_000
    assert counters.count(counters.Event(99, 99)) is None


def test_a_figure_that_no_round_has_leaves_its_cell_empty() -> None:
    samples = Samples()
    for row, values in {"raw": {"us": 1.0}, "ours": {"us": 3.0}}.items():
        samples.add(row, values)

    assert added("added", "us", to="raw").value(samples, "ours") == 2.0
    assert added("instructions added", "instructions", to="raw").value(samples, "ours") is None
