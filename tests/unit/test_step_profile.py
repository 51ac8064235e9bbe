"""Which steps are recorded, and that a training neither waits for the record nor dies of it."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_hpc.base.errors import ConfigError
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import ResourcesSpec, RunSpec, TrainSpec
from ddp_hpc.run.spec.script import ScriptSpec
from ddp_hpc.run.spec.training import ProfileSpec
from ddp_hpc.train.recording.phase_times import PhaseTimes
from ddp_hpc.train.recording.step_profile import StepProfile, phase_timer

CPU = torch.device("cpu")


class Loop:
    """The phases of the loop, as `train` enters them, around a small computation."""

    def __init__(self, folder: Path, steps: tuple[int, int], *, done: int = 0) -> None:
        self.done = done
        self.trace, self.table = folder / "profile" / "trace.json.gz", folder / "profile" / "operators.txt"
        self.timer = StepProfile(steps, self.trace, self.table, CPU, lambda: self.done + 1)

    def run(self, num_steps: int, *, has_more: bool = True) -> None:
        for number in range(num_steps):
            self.timer.enter("forward")
            torch.ones(8, 8).mm(torch.ones(8, 8))
            self.timer.enter("optimizer")
            self.timer.enter("other")
            self.done += 1
            self.timer.enter("data" if has_more or number + 1 < num_steps else "checkpoint")

    @property
    def names(self) -> list[str]:
        events: list[dict[str, Any]] = json.loads(gzip.decompress(self.trace.read_bytes()))["traceEvents"]
        return [event["name"] for event in events if event.get("cat") == "user_annotation"]

    @property
    def steps(self) -> list[str]:
        return sorted({name for name in self.names if name.startswith("step ")})


def test_the_chosen_steps_are_recorded_with_their_phases_and_operators_and_no_others(tmp_path: Path) -> None:
    loop = Loop(tmp_path, (3, 4))

    loop.run(7)

    assert loop.steps == ["step 3", "step 4"]
    assert {"forward", "optimizer", "data"} <= set(loop.names)
    assert "aten::mm" in loop.table.read_text()
    assert loop.table.read_text().startswith("steps 3 to 4\n")
    assert sorted(path.name for path in loop.trace.parent.iterdir()) == ["operators.txt", "trace.json.gz"]


def test_the_table_of_operators_has_no_ranges_whose_time_would_count_twice(tmp_path: Path) -> None:
    loop = Loop(tmp_path, (2, 2))

    loop.run(4)

    names = [line.split()[0] for line in loop.table.read_text().splitlines() if line.strip()]
    assert "aten::mm" in names
    assert {"forward", "optimizer", "data", "step"}.isdisjoint(names)


def test_the_first_step_of_all_can_be_recorded(tmp_path: Path) -> None:
    loop = Loop(tmp_path, (1, 1))

    loop.run(2)

    assert loop.steps == ["step 1"]


def test_a_stop_among_these_steps_leaves_what_there_is(tmp_path: Path) -> None:
    loop = Loop(tmp_path, (2, 50))

    loop.run(3)
    loop.timer.close()

    assert {"step 2", "step 3"} <= set(loop.steps)
    assert "step 5" not in loop.steps


def test_the_steps_that_were_recorded_are_named_not_those_that_were_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loop = Loop(tmp_path, (2, 9), done=3)

    loop.run(3, has_more=False)  # the training stops after step 6, and saves
    loop.timer.close()

    assert f"profile of steps 4 to 6: {loop.trace}" in caplog.text
    assert loop.table.read_text().startswith("steps 4 to 6\n")
    assert loop.steps == ["step 4", "step 5", "step 6"]


def test_a_save_belongs_to_the_step_before_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path, (1, 9))

    loop.run(1, has_more=False)
    loop.run(2)
    loop.timer.close()

    names = [name for name in loop.names if name.startswith("step ") or name == "checkpoint"]
    assert names.index("checkpoint") < names.index("step 2")
    assert loop.steps == ["step 1", "step 2", "step 3", "step 4"]


def test_a_run_that_resumes_behind_these_steps_records_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, (3, 4), done=4)

    loop.run(5)
    loop.timer.close()

    assert not loop.trace.parent.exists()
    assert "no profile of steps 3 to 4: the attempt began behind these steps" in caplog.text


def test_a_run_that_resumes_among_these_steps_records_the_rest(tmp_path: Path) -> None:
    loop = Loop(tmp_path, (3, 6), done=4)

    loop.run(4)

    assert loop.steps == ["step 5", "step 6"]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_training_that_ends_before_these_steps_leaves_no_file_and_no_profiler_that_runs(
    num_steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path / "short", (3, 4))
    loop.run(num_steps, has_more=False)
    loop.timer.close()
    assert not loop.trace.parent.exists()
    assert "no profile of steps 3 to 4: the attempt ended before step 3" in caplog.text

    other = Loop(tmp_path / "other", (1, 1))
    other.run(2)

    assert other.steps == ["step 1"]


def test_a_record_that_cannot_be_written_is_said_and_the_phases_are_still_timed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("in the way")
    loop = Loop(tmp_path, (2, 2))

    with caplog.at_level(logging.WARNING):
        loop.run(4)
        loop.timer.close()

    assert "the profile of steps 2 to 2 cannot be recorded" in caplog.text
    assert caplog.text.count("cannot be recorded") == 1
    assert loop.timer.times_so_far().seconds["forward"] > 0


@pytest.mark.parametrize("first", [1, 4])
def test_where_a_profiler_of_the_recipe_runs_the_training_goes_on_and_that_profiler_keeps_its_trace(
    first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It begins before the step that is recorded, or before what prepares that."""
    loop, own = Loop(tmp_path, (first, 5)), tmp_path / "own.json"
    loop.run(2)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loop.run(4)
    profiler.export_chrome_trace(str(own))
    loop.timer.close()

    assert loop.done == 6
    assert "aten::mm" in own.read_text()
    assert "of the recipe" in caplog.text


def test_a_profile_ends_where_a_profiler_of_the_recipe_begins(tmp_path: Path) -> None:
    loop, own = Loop(tmp_path, (2, 50)), tmp_path / "own.json"

    loop.run(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loop.run(4)
    profiler.export_chrome_trace(str(own))
    loop.timer.close()
    again = Loop(tmp_path / "again", (1, 1))
    again.run(2)

    assert {"step 2", "step 3"} <= set(loop.steps)
    assert "aten::mm" in own.read_text()
    assert again.steps == ["step 1"]


class OfRank:
    """As much of a group as is asked for."""

    def __init__(self, rank: int) -> None:
        self.rank_info = self
        self.rank = rank
        self.device = CPU


@pytest.mark.parametrize(
    ("spec", "rank"), [(ProfileSpec(), 0), (ProfileSpec(kind="torch"), 1), (ProfileSpec(kind="torch", ranks=(1, 3)), 2)]
)
def test_a_rank_that_records_nothing_has_the_plain_timer(spec: ProfileSpec, rank: int, tmp_path: Path) -> None:
    timer = phase_timer(spec, RunDir(tmp_path), OfRank(rank), attempt=0, next_step=lambda: 1)  # type: ignore[arg-type]

    assert type(timer) is PhaseTimes


def test_a_rank_that_records_has_files_of_its_own(tmp_path: Path) -> None:
    spec = ProfileSpec(kind="torch", ranks=(1,), steps=(1, 1))
    timer = phase_timer(spec, RunDir(tmp_path), OfRank(1), attempt=2, next_step=lambda: 1)  # type: ignore[arg-type]

    timer.enter("forward")
    timer.close()

    assert [path.name for path in RunDir(tmp_path).profile.glob("*.gz")] == ["attempt-2.rank-1.trace.json.gz"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"steps": (0, 3)}, r"`profile.steps` is \[0, 3\]"),
        ({"steps": (5, 4)}, r"`profile.steps` is \[5, 4\]"),
        ({"ranks": ()}, r"`profile.ranks` is \[\]"),
        ({"ranks": (-1,)}, r"`profile.ranks` is \[-1\]"),
    ],
)
def test_steps_and_ranks_that_cannot_be_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ProfileSpec(kind="torch", **keys)


def test_a_rank_that_the_run_does_not_have_is_refused() -> None:
    profile, resources = ProfileSpec(kind="torch", ranks=(0, 2)), ResourcesSpec(workers_per_node=2)

    with pytest.raises(ConfigError, match="the run has 2 ranks, counted from 0"):
        RunSpec(name="a", profile=profile, resources=resources, train=TrainSpec(global_batch_size=64))


def test_a_profile_of_a_script_is_refused_with_what_to_do_instead() -> None:
    script = ScriptSpec(command=("python", "train.py"))

    with pytest.raises(ConfigError, match=r"a script's steps are its own.*torch\.profiler"):
        RunSpec(name="a", script=script, profile=ProfileSpec(kind="torch"))
