"""Losses and rates as a screen shows them: thinned out, with their extremes, whatever stands in the file."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch.report.charts import charts_of
from ddp_hpc.watch.report.series import NUM_BINS, ChartPoint, finite_points, read_series, thin_out
from tests.made_run import make_run


def line(step: int, loss: object, kind: str = "train", **more: object) -> str:
    return json.dumps({"kind": kind, "step": step, "epoch": 1, "loss": loss, "at": 1.0, **more}) + "\n"


def run_with(folder: Path, text: str, superseded: str = "") -> RunDir:
    run = make_run(folder)
    run.metrics.write_text(text)
    if superseded:
        run.superseded_metrics.write_text(superseded)
    return run


def test_thinning_keeps_ends_and_extremes() -> None:
    points = [ChartPoint(step, math.sin(step / 900)) for step in range(200_000)]
    points[123_456] = ChartPoint(123_456, 99.0)
    points[77_777] = ChartPoint(77_777, -99.0)

    kept = thin_out(points)

    assert len(kept) <= 4 * (NUM_BINS + 1)
    assert {points[0], points[-1], points[123_456], points[77_777]} <= {*kept}
    assert kept == sorted(kept)


def test_few_points_stay_as_they_are() -> None:
    points = [ChartPoint(step, 1.0) for step in range(100)]

    assert thin_out(points) == points


def test_losses_that_are_not_finite_are_marked_and_not_drawn(tmp_path: Path) -> None:
    """Our own recorder writes null; others write NaN, which is not JSON."""
    run = run_with(tmp_path, line(1, 2.0) + line(2, None) + line(3, math.nan) + line(4, math.inf) + line(5, 1.0))

    series = read_series(run)

    assert [point.step for point in finite_points(series.loss)] == [1, 5]
    assert [point.step for point in series.loss] == [1, 2, 3, 4, 5]
    (chart,) = charts_of(series, {})
    assert [chart.path(one.points).count("M") for one in chart.lines] == [2, 1, 1, 1]  # no line over the steps between


def test_each_further_number_that_the_run_has_gets_a_chart(tmp_path: Path) -> None:
    lines = [
        line(
            step,
            1.0,
            grad_norm=50.0 / step,
            loss_scale=65536.0 / step,
            skipped_updates=int(step == 2),
            tokens_per_s=rate,
        )
        for step, rate in [(1, None), (2, 1e5), (4, 2e5), (8, 1.5e5), (50, 1e5)]
    ]

    _, *charts = charts_of(read_series(run_with(tmp_path, "".join(lines))), {0: 0, 1: 4})

    shown = [(chart.title, chart.description, len(chart.readings)) for chart in charts]
    assert shown == [
        ("Tokens", "tokens/s", 4),
        ("Gradient norm", "before clipping, y axis logarithmic", 5),
        ("Loss scale", "y axis logarithmic", 5),
        ("Skipped updates", "of each log interval", 5),
    ]
    assert all([one.kind for one in chart.lines] == ["main", "start"] for chart in charts)


def test_numbers_that_a_run_does_not_have_and_updates_that_were_never_skipped_get_none(tmp_path: Path) -> None:
    lines = [line(step, 1.0, grad_norm=None, skipped_updates=0) for step in range(1, 9)]

    found = charts_of(read_series(run_with(tmp_path, "".join(lines))), {})

    assert [chart.title for chart in found] == ["Loss"]


def test_what_is_half_written_or_of_others_is_skipped(tmp_path: Path) -> None:
    odd = "\0\0\n[]\n7\n{}\n" + '{"kind":"train","step":"x"}\n' + line(2, "high") + '\xff\n{"kind":"train","step":3,"lo'
    run = run_with(tmp_path, line(1, 2.0) + odd)

    assert [point.step for point in read_series(run).loss] == [1]


def test_evaluations_have_all_their_numbers(tmp_path: Path) -> None:
    run = run_with(tmp_path, line(10, 0.5, "eval", accuracy=0.9) + line(20, 0.4, "eval", accuracy=0.95))

    found = read_series(run).evaluations

    assert found == {"loss": [(10, 0.5), (20, 0.4)], "accuracy": [(10, 0.9), (20, 0.95)]}


def test_steps_that_two_attempts_lost_are_two_pieces(tmp_path: Path) -> None:
    lost = "".join(line(step, 1.0) for step in (310, 320, 330, 910, 920, 320, 330))

    parts = read_series(run_with(tmp_path, line(400, 1.0), lost)).superseded

    assert [[point.step for point in part] for part in parts] == [[310, 320, 330], [910, 920], [320, 330]]


def test_a_run_without_metrics_has_empty_series(tmp_path: Path) -> None:
    assert not read_series(make_run(tmp_path)).loss


def test_evaluations_that_are_not_finite_are_marked_at_their_steps(tmp_path: Path) -> None:
    told = [
        line(10, 0.5, "eval", accuracy=0.7),
        line(20, None, "eval", accuracy=math.inf),
        line(30, 0.4, "eval", accuracy=0.9),
    ]

    series = read_series(run_with(tmp_path, line(30, 0.3) + "".join(told)))

    (loss, chart) = charts_of(series, {})
    titles = [[line.title for line in one.lines if line.kind == "broken"] for one in (loss, chart)]
    assert titles == [
        ["step 20: the loss of the evaluation is NaN or infinite"],
        ["step 20: the accuracy of the evaluation is NaN or infinite"],
    ]
