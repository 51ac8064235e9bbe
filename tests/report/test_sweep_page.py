"""The page of a sweep: the best point first, what each key changes, why points failed, and quick with very many points."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.launch.sweep.sweep_dir import SweepDir, read_sweep
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress, write_progress
from ddp_hpc.watch.attempt_times import read_times
from ddp_hpc.watch.goodput import goodput_of
from ddp_hpc.watch.report.sweep import key_chart, sweep_page
from ddp_hpc.watch.report.sweep_points import Goal, best_first, goal_of, read_points
from tests.report.made import BEGIN, large_sweep
from tests.report.test_page import Outline

NOW = BEGIN + 50_000.0


def runs_of(folder: Path) -> list[tuple[RunDir, dict[str, object]]]:
    sweep = SweepDir(folder)
    return [(sweep.run(point), point.shown_settings) for point in read_sweep(sweep).points]


def test_the_points_are_sorted_by_the_loss_and_by_the_metric_that_the_configuration_names(tmp_path: Path) -> None:
    folder = large_sweep(tmp_path / "grid", num_points=24, reached=300)
    by_loss, _ = read_points(runs_of(folder), now=NOW)

    assert goal_of(by_loss) == Goal(metric="loss")
    losses = [one.status.metrics["loss"] for one in best_first(by_loss, goal_of(by_loss))]
    assert losses == sorted(losses)

    for run, _ in runs_of(folder):
        text = run.config.read_text().replace(
            "checkpoint:\n", "checkpoint:\n  best_metric: accuracy\n  best_is: highest\n"
        )
        run.config.unlink()
        run.config.write_text(text)
    by_accuracy, _ = read_points(runs_of(folder), now=NOW)

    assert goal_of(by_accuracy) == Goal(metric="accuracy", is_highest=True)
    scores = [one.status.metrics["accuracy"] for one in best_first(by_accuracy, goal_of(by_accuracy))]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("is_highest", [False, True])
def test_points_that_have_diverged_come_last_and_the_best_is_the_best_of_the_others(
    is_highest: bool, tmp_path: Path
) -> None:
    losses = [math.nan, 2.0, math.inf, 1.0, -math.inf, 0.5, math.nan, 3.0]
    runs = runs_of(large_sweep(tmp_path / "grid", num_points=len(losses), reached=300))
    for (run, _), loss in zip(runs, losses, strict=True):
        progress = read_progress(run)
        assert progress is not None
        write_progress(run, replace(progress, loss=loss, metrics={}))
    points, _ = read_points(runs, now=NOW)
    goal = Goal(metric="loss", is_highest=is_highest, is_evaluated=False)

    values = [goal.value(one) for one in best_first(points, goal)]

    assert values == [*sorted([0.5, 1.0, 2.0, 3.0], reverse=is_highest), *[None] * 4]
    assert "Best loss of the training: 0.5, 0005-point" in Outline(sweep_page("grid", runs, now=NOW, environ={})).text


def test_the_goodput_of_each_point_is_that_of_its_own_page(tmp_path: Path) -> None:
    points, unreadable = read_points(runs_of(large_sweep(tmp_path / "grid", num_points=8, reached=900)), now=NOW)

    assert unreadable == []
    assert {one.status.state for one in points} == {"finished", "failed"}
    for one in points:
        assert one.goodput == goodput_of(read_times(one.run, now=NOW, is_alive=False))


def test_points_that_failed_in_one_way_are_counted_and_those_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    runs = runs_of(large_sweep(tmp_path / "grid", num_points=24, reached=300))
    runs[0][0].attempts.unlink()
    runs[0][0].attempts.mkdir()
    runs[1][0].config.unlink()

    text = Outline(sweep_page("grid", runs, now=NOW, environ={})).text

    assert "24 points: 19 finished, 3 failed, 1 not begun." in text
    assert "0000-point cannot be read:" in text
    assert "3 points : rank 1 on node00: OutOfMemoryError: out of GPU memory (0007-point" in text


def test_a_secret_of_a_point_is_not_on_the_page(tmp_path: Path) -> None:
    runs = runs_of(large_sweep(tmp_path / "grid", num_points=2, reached=300))
    run = runs[0][0]
    text = run.config.read_text() + "env: {WANDB_API_KEY: sekrit-abcdef-123456}\n"
    run.config.unlink()
    run.config.write_text(text)
    shown: list[tuple[RunDir, dict[str, object]]] = [(run, {"optimizer": "sekrit-abcdef-123456"}), *runs[1:]]

    assert "sekrit" not in sweep_page("grid", shown, now=NOW, environ={})


def test_a_thousand_points_have_a_small_page_with_all_rows_and_as_many_charts_as_one_can_look_at(
    tmp_path: Path,
) -> None:
    runs = runs_of(large_sweep(tmp_path / "grid", num_points=100, reached=300)) * 10

    page = sweep_page("grid", runs, now=NOW, environ={})

    assert len(page) < 2_000_000
    found = Outline(page)
    assert found.headings == ["Points that ended too early", "What each key changes", "Points", "Losses"]
    assert page.count("<tr>") == 1001
    assert page.count("<figure>") == 2 + 60
    assert "Only the best 60 points have a chart of their loss; the table has all." in found.text


MEASURED: list[tuple[Any, float, str]] = [(0.01, 1.0, "b"), (0.1, 2.0, "c"), (0.1, 3.0, "a")]


def test_a_key_with_few_values_has_them_side_by_side_and_a_line_through_the_best() -> None:
    chart = key_chart("train.lr", "loss", MEASURED)

    assert chart is not None
    assert chart.x.ticks == [(0.25, "0.01"), (0.75, "0.1")]
    dots, line, best = chart.lines
    assert chart.path(dots.points).count("M") == 3
    assert chart.path(line.points).count("L") == 1
    assert best.title == "the best, b: train.lr 0.01, loss 1"


def test_the_chart_of_a_key_is_named_by_the_metric_and_the_key(tmp_path: Path) -> None:
    page = sweep_page("grid", runs_of(large_sweep(tmp_path / "grid", num_points=4, reached=300)), now=NOW, environ={})

    assert re.findall(r'aria-label="([^"]* over (?!steps)[^",]*)', page) == ["loss over train.lr"]


def test_a_key_with_many_values_has_few_labels_and_one_with_one_value_no_chart() -> None:
    many = key_chart("lr", "loss", [(2.0**-number, 3.0**number, "") for number in range(20)])

    assert many is not None
    assert many.description == "y axis logarithmic"
    assert [text for _, text in many.x.ticks] == ["1.9e-06", "6.1e-05", "0.001953", "0.0625"]
    assert [one.kind for one in many.lines] == ["points", "best"]
    assert key_chart("lr", "loss", [(0.1, 3.0, "a"), (0.1, 2.0, "c")]) is None


@pytest.mark.parametrize("values", [["adam", "sgd"], [None, 1], [True, False], [[1, 2], [3]], [float("inf"), 1.0]])
def test_values_that_are_no_numbers_have_a_place_each(values: list[Any]) -> None:
    chart = key_chart("key", "loss", [(value, 1.0, "") for value in values])

    assert chart is not None
    assert [at for at, _ in chart.x.ticks] == [0.25, 0.75]
