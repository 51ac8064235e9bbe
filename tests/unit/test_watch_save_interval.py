"""What `status` and the report say of how often a run saves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.timeline import Mark, as_line, read_marks
from ddp_hpc.run.spec.training import CheckpointSpec
from ddp_hpc.watch.attempt_times import KINDS, read_times
from ddp_hpc.watch.goodput import measured_cost_share, newest_interval
from ddp_hpc.watch.report.notes import notes_of
from ddp_hpc.watch.report.page import view_of
from ddp_hpc.watch.report.reading import read_run
from tests.report.made import Plan, made_run

CHOICE = {
    "every_steps": 340.0,
    "seconds": 540.0,
    "stall_s": 1.2,
    "write_s": 3.0,
    "restart_s": 40.0,
    "between_failures_s": 40_000.0,
    "is_measured": 1.0,
    "num_failures": 1.0,
    "expected_cost": 0.0123,
}


def failed_once(path: Path, *choices: dict[str, Any]) -> RunDir:
    plans = [Plan(first=0, reached=340), Plan(first=300, reached=500, ending="finished", cause="finished")]
    run = made_run(path, plans)
    run.config.write_text(f"name: {run.name}\ncheckpoint:\n  every_steps: auto\n")
    with run.timeline.open("ab") as file:
        for choice in choices:
            file.write(as_line(Mark(kind="interval", attempt=1, at=1.0, step=310, interval=choice)))
    return run


def test_status_shows_what_saves_should_cost_beside_what_they_have_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = failed_once(tmp_path / "run", {**CHOICE, "every_steps": 20.0}, CHOICE)

    assert main(["status", str(run.path)]) == 0
    text = capsys.readouterr().out
    assert main(["status", str(run.path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["save_interval"]

    cost = measured_cost_share(read_times(run, now=0.0, is_alive=False))
    assert cost is not None
    assert (
        f"saves       every 340 steps (about 9 min): saves and failures take 1.2% of the time by estimate, and have taken {cost:.1%}; a save stops training for 1.2 s, a start "
        "takes 40 s, one failure every 11 h is expected (1 so far)\n"
    ) in text
    assert record["every_steps"] == 340
    assert (record["expected_cost"], record["measured_cost"]) == (0.0123, pytest.approx(cost))
    assert record["costs"]["between_failures_s"] == 40_000.0


def test_what_saves_have_cost_is_saving_losing_and_starting_after_a_failure(tmp_path: Path) -> None:
    times = read_times(failed_once(tmp_path / "run"), now=0.0, is_alive=False)

    spent = 40.0 + sum(one.seconds["saving"] + one.seconds["lost"] for one in times)  # the first start is no part of it
    assert measured_cost_share(times) == pytest.approx(spent / (spent + sum(one.seconds["training"] for one in times)))
    assert measured_cost_share([]) is None


@pytest.mark.parametrize("damaged", [{}, {"every_steps": 5.0}, {**CHOICE, "every_steps": "many"}])
def test_a_choice_whose_numbers_are_not_whole_is_not_shown(damaged: dict[str, Any], tmp_path: Path) -> None:
    run = failed_once(tmp_path / "run", damaged)

    assert newest_interval(read_marks(run), []) is None


def test_the_report_says_that_the_interval_was_chosen_and_what_it_has_cost(tmp_path: Path) -> None:
    text = view_of(read_run(failed_once(tmp_path / "run", CHOICE), now=2e9))["cost"]

    assert text.startswith(
        "`checkpoint.every_steps=auto` saves every 340 steps (about 9 min): saves and failures take 1.2% of the time by estimate, and"
    )
    assert "least" not in text  # no other interval is recommended beside the chosen one


@pytest.mark.parametrize(
    ("seconds", "saving", "lost", "key"),
    [
        (60.0, 0.02, 0.2, "a smaller checkpoint.min_interval_s"),
        (3600.0, 0.2, 0.02, "a larger checkpoint.max_interval_s"),
        (540.0, 0.12, 0.2, None),  # both were weighed
        (60.0, 0.2, 0.02, None),
    ],
)
def test_the_report_advises_to_move_a_limit_of_auto_and_never_to_switch_it_off(
    seconds: float, saving: float, lost: float, key: str | None, tmp_path: Path
) -> None:
    run = failed_once(tmp_path / "run", {**CHOICE, "seconds": seconds})
    with run.config.open("a") as file:
        file.write("  min_interval_s: 60\n  max_interval_s: 3600\n")
    read = read_run(run, now=2e9)
    hours = {**dict.fromkeys(KINDS, 0.0), "saving": saving, "lost": lost, "training": 1.0 - saving - lost}
    read = replace(read, goodput=replace(read.goodput, node_hours=hours))

    keys = [key for _, key in notes_of(read) if "checkpoint." in key]

    assert keys == ([] if key is None else [key])


def test_the_report_of_a_fixed_interval_advises_auto(tmp_path: Path) -> None:
    run = failed_once(tmp_path / "run")
    run.config.write_text(f"name: {run.name}\ncheckpoint:\n  every_steps: 100\n")
    read = read_run(run, now=2e9)
    hours = {**dict.fromkeys(KINDS, 0.0), "lost": 0.2, "training": 0.8}
    read = replace(read, goodput=replace(read.goodput, node_hours=hours))

    assert view_of(read)["cost"] == ""
    assert [key for _, key in notes_of(read)] == ["checkpoint.every_steps=auto, or a smaller number"]


def test_a_site_may_set_one_limit_of_auto_for_runs_that_do_not_use_it() -> None:
    assert CheckpointSpec(min_interval_s=7200).max_interval_s == 3600

    with pytest.raises(ConfigError, match="the shortest interval must not be longer"):
        CheckpointSpec(every_steps="auto", min_interval_s=7200)
