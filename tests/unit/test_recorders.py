"""What other recorders get of a run's metrics: each step once, whatever fails in between; TensorBoard by its own reader."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args
from unittest.mock import Mock

import pytest

from ddp_hpc.base import processes
from ddp_hpc.base.discretion import secret_values
from ddp_hpc.base.durable import read_line
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.base.exit_codes import STOPPED
from ddp_hpc.launch.submission.run_dir_setup import check_settings
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.spec import LogSpec, RunSpec, SlurmSpec
from ddp_hpc.run.spec.training import RecorderName
from ddp_hpc.train import worker
from ddp_hpc.train.recording import metrics_file, to_tensorboard
from ddp_hpc.train.recording.follower import follow, masked_config, recorder_lock
from ddp_hpc.train.recording.metrics_file import MetricsFile
from ddp_hpc.train.recording.recorders import (
    BACK_ENDS,
    Ending,
    MetricsRow,
    RecordedRun,
    Recorder,
    SentNumbers,
    identity_of,
    row_of,
)
from ddp_hpc.train.recording.temporary import temporary_folder
from ddp_hpc.train.watchdog import Watchdog
from tests.made_run import make_run


def line(step: int, kind: str = "train", **numbers: float | None) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": 1, **(numbers or {"loss": step / 8}), "at": 1000.0 + step}


def written(run: RunDir, resumed_at: int, steps: Sequence[int]) -> None:
    """Write the lines of one attempt, as rank zero does."""
    file = MetricsFile(run, 0)
    file.open(resumed_at)
    for step in steps:
        file.append(line(step))
    file.close()


class Listed:
    """A recorder that keeps what it gets, and fails when it is to."""

    def __init__(self, fails_at: Sequence[int] = ()) -> None:
        self.rows: list[MetricsRow] = []
        self.fails_at = [*fails_at]
        self.num_flushed = 0
        self.ending: Ending | None = None

    def record(self, row: MetricsRow) -> None:
        if row.step in self.fails_at:
            self.fails_at.remove(row.step)
            raise RuntimeError("the server says no")
        if row.step not in {one.step for one in self.rows}:
            self.rows.append(row)

    def flush(self) -> None:
        self.num_flushed += 1

    def close(self, ending: Ending) -> None:
        self.ending = ending


def test_a_line_becomes_tags_and_values_and_null_becomes_nan_unless_it_says_not_measured() -> None:
    row = row_of(line(3, loss=None, lr=0.5, samples_per_s=None, tokens_per_s=9.0))

    assert row is not None
    assert (row.step, row.at) == (3, 1003.0)
    assert row.numbers.keys() == {"train/loss", "train/lr", "train/tokens_per_s"}
    assert math.isnan(row.numbers["train/loss"])


@pytest.mark.parametrize("odd", [{}, {"kind": "train"}, {"kind": 3, "step": 1, "at": 1.0}, line(1) | {"at": "noon"}])
def test_a_line_that_somebody_has_edited_is_left_out(odd: dict[str, Any]) -> None:
    assert row_of(odd) is None


def test_a_recorder_gets_each_line_as_it_is_written_and_then_the_ending(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    recorder = Listed()
    written(run, 0, [1, 2])

    def wait(_: float) -> Ending | None:
        if recorder.num_flushed == 1 and len(recorder.rows) == 2:
            written(run, 2, [3])
            return None
        return "stopped" if len(recorder.rows) == 3 else None

    assert follow(run, lambda: recorder, wait)
    assert [row.step for row in recorder.rows] == [1, 2, 3]
    assert recorder.ending == "stopped"


def test_the_lines_before_a_resume_are_not_all_objects_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    written(run, 0, range(1, 3001))
    recorder = Mock(record=lambda _: None)
    tracemalloc.start()

    follow(run, lambda: recorder, lambda _: "finished")

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * run.metrics.stat().st_size


def test_a_recorder_is_not_opened_before_there_is_a_line(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    def must_not_open() -> Recorder:
        raise AssertionError

    assert follow(run, must_not_open, lambda _: "finished")


def test_after_an_error_it_is_opened_again_after_a_pause_and_gets_all_lines_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    written(run, 0, [1, 2, 3])
    recorder, opened, now = Listed(fails_at=[2, 3]), [], [0.0]

    def wait(_: float) -> Ending | None:
        now[0] += 1.0
        return "finished" if recorder.num_flushed else None

    def opens() -> Recorder:
        opened.append(now[0])
        return recorder

    assert follow(run, opens, wait, clock=lambda: now[0])
    assert [row.step for row in recorder.rows] == [1, 2, 3]
    assert opened == [0.0, 10.0, 30.0]
    assert [record.getMessage() for record in caplog.records] == [
        "the server says no. The training goes on; trying again in 10 s.",
        "the server says no. The training goes on; trying again in 20 s.",
    ]


def test_a_recorder_that_fails_at_the_end_is_said_not_to_have_all(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    written(run, 0, [1])

    assert not follow(run, lambda: Listed(fails_at=[1]), lambda _: "finished", clock=lambda: -1.0)


def test_an_id_stays_and_a_copy_of_the_run_has_another(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = identity_of(run)
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)

    assert identity_of(run) == first
    assert identity_of(copy) != first
    assert identity_of(copy) == identity_of(copy)


def test_a_run_has_one_id_by_each_of_its_paths(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "link").symlink_to(run.path)

    assert identity_of(RunDir(tmp_path / "link")) == identity_of(run) == identity_of(RunDir(tmp_path / "link"))


def test_a_recorder_gets_the_configuration_without_secrets_also_those_in_addresses() -> None:
    values = {
        "recipe.args.url": "postgres://ada:hunter2pw@host/data",
        "recipe.args.db_password": "long secret",
        "recipe.args.command": ["load", "--with", "long secret"],
        "recipe.args.mirrors": {"near": "https://bob:swordfish@host"},
        "train.lr": 0.1,
    }

    assert masked_config(values, secret_values(values, {})) == {
        "recipe.args.url": "postgres://ada:***@host/data",
        "recipe.args.command": ["load", "--with", "***"],
        "recipe.args.mirrors": {"near": "https://bob:***@host"},
        "train.lr": 0.1,
    }


def test_a_number_is_taken_once_also_nan_and_steps_that_change_are_named(caplog: pytest.LogCaptureFixture) -> None:
    sent = SentNumbers()

    taken = [
        sent.add_if_new(step, "train/loss", value) for step, value in ((1, math.nan), (1, math.nan), (2, 0.5), (2, 0.5))
    ]
    sent.warn_of_changes()

    assert taken == [True, False, True, False]
    assert caplog.records == []

    assert not sent.add_if_new(1, "train/loss", 0.25)
    sent.warn_of_changes()
    sent.warn_of_changes()

    assert [one.getMessage().partition(". ")[0] for one in caplog.records] == [
        "steps that were repeated have other values than the first time: 1"
    ]


def test_each_recorder_has_a_back_end() -> None:
    assert BACK_ENDS.keys() == {*get_args(RecorderName)}


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds no module any more that is not imported yet."""
    monkeypatch.setattr(sys, "path", [])
    for name in [name for name in sys.modules if name.partition(".")[0] in BACK_ENDS]:
        monkeypatch.delitem(sys.modules, name)


def test_a_recorder_whose_package_is_missing_is_refused_with_what_installs_it(nothing_installed: None) -> None:
    with pytest.raises(ConfigError, match=r"`log\.recorders` asks for 'wandb'.* `pip install 'ddp_hpc\[wandb\]'`"):
        LogSpec(recorders=("wandb",)).require_recorders()
    LogSpec().require_recorders()


def test_it_is_refused_at_submission_unless_workers_may_have_other_packages(nothing_installed: None) -> None:
    asked = RunSpec(name="a", log=LogSpec(recorders=("wandb",)))

    with pytest.raises(ConfigError, match="wandb"):
        check_settings(asked, Path("/runs/a"), {})
    check_settings(replace(asked, slurm=SlurmSpec(modules=("wandb/0.31",))), Path("/runs/a"), {})
    check_settings(replace(asked, env={"PYTHONPATH": "/site/python"}), Path("/runs/a"), {})


def recorded(run: RunDir, ending: Ending = "finished") -> None:
    assert follow(run, lambda: to_tensorboard.open_recorder(RecordedRun(run=run, id="x")), lambda _: ending)


def test_what_is_left_is_not_sent_while_the_run_sends_it_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    written(run, 0, [1])
    argv = [sys.executable, "-m", "ddp_hpc.train.recording.follower", str(run.path), "tensorboard"]
    lock = processes.take_lock(run.lock)
    assert lock is not None

    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    processes.release_lock(lock)

    assert refused.returncode == 1
    assert "digits is running: the run itself sends its metrics to tensorboard." in refused.stderr
    assert not run.tensorboard.exists()


def test_of_two_processes_one_sends_to_a_recorder_and_the_other_when_that_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    written(run, 0, [1])
    argv = [sys.executable, "-m", "ddp_hpc.train.recording.follower", str(run.path), "tensorboard"]
    run.console.parent.mkdir()
    lock, beside_rank_zero = processes.take_lock(run.recorder_lock("tensorboard")), recorder_lock(run, "tensorboard")
    assert lock is not None

    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    before = beside_rank_zero()
    processes.release_lock(lock)
    after = beside_rank_zero()

    assert (before, after) == (False, True)
    assert refused.returncode == 1
    assert "another process sends the metrics of digits to tensorboard. Try again when it has ended." in refused.stderr
    assert not run.tensorboard.exists()


@pytest.mark.parametrize("hangs", ["recorder", "samples"])
def test_a_record_that_is_never_closed_after_the_training_does_not_keep_the_worker(
    monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    left, codes = threading.Event(), []

    def leave(code: int) -> None:
        codes.append(code)
        left.set()

    records = {name: SimpleNamespace(close=lambda *_: None) for name in ("phases", "recorder", "samples")}
    records[hangs].close = lambda *_: left.wait(60.0)
    monkeypatch.setattr(worker, "train", lambda _: False)
    monkeypatch.setattr(worker, "TEARDOWN_S", 0.1)
    monkeypatch.setattr(worker, "WAIT_S_BY_ENDING", {"stopped": 0.1})
    monkeypatch.setattr(os, "_exit", leave)

    training = SimpleNamespace(**records, observers=[records["samples"]])
    worker._train_and_close(cast("Any", training), Watchdog(None))

    assert codes == [STOPPED]


def test_a_temporary_directory_of_a_killed_process_is_removed_by_the_next_and_one_in_use_stays(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as in_use:
        killed = shutil.copytree(in_use, tmp_path / f"{in_use.name}-killed")
        others = tmp_path / "of-others"
        others.mkdir()
        for path in (in_use, killed, others):
            os.utime(path, (0, 0))

        with temporary_folder(tmp_path) as newer:
            assert {*tmp_path.iterdir()} == {in_use, newer, others}

    assert [*tmp_path.iterdir()] == [others]


def events_in(folder: Path) -> Mapping[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def events_of(run: RunDir) -> Mapping[str, list[tuple[int, float]]]:
    return events_in(run.tensorboard / to_tensorboard.FOLDER)


def test_tensorboards_own_reader_finds_each_step_once_after_attempts_that_repeat_steps_and_kills(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    for resumed_at, steps in ((0, range(1, 8)), (4, range(5, 10)), (4, range(5, 7)), (6, range(7, 13))):
        written(run, resumed_at, steps)
        recorder = to_tensorboard.open_recorder(RecordedRun(run=run, id="x"))
        for raw in run.metrics.read_text().splitlines():
            row = row_of(json.loads(raw))
            assert row is not None
            recorder.record(row)
        if resumed_at != 4:  # the others are killed before they delete the files of attempts before
            recorder.flush()
        recorder.close("failed")
        newest = max((run.tensorboard / to_tensorboard.FOLDER).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        newest.write_bytes(newest.read_bytes()[:-5])  # in the middle of an event

    recorded(run)

    assert events_of(run) == {"train/loss": [(step, step / 8) for step in range(1, 13)]}


def test_what_a_recipe_writes_to_tensorboard_itself_stays_on_display_after_each_attempt(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    run = make_run(tmp_path)
    written(run, 0, [1, 2])
    with SummaryWriter(str(run.tensorboard)) as own:
        for step in (1, 2):
            own.add_scalar("own", step / 4, step)

    recorded(run)
    recorded(run)

    assert events_of(run) == {"train/loss": [(1, 0.125), (2, 0.25)]}
    assert events_in(run.tensorboard) == {"own": [(1, 0.25), (2, 0.5)]}


def test_a_file_of_a_node_whose_clock_is_ahead_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    written(run, 0, [1, 2])
    folder = run.tensorboard / to_tensorboard.FOLDER
    folder.mkdir(parents=True)
    ahead = folder / "events.out.tfevents.9999999999.n2.1.2"
    ahead.write_bytes(b"of an attempt before")

    recorded(run)

    assert events_of(run) == {"train/loss": [(1, 0.125), (2, 0.25)]}
    assert not ahead.exists()


def test_nan_reaches_tensorboard(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = MetricsFile(run, 0)
    file.open(0)
    file.append(line(1, loss=math.nan))
    file.close()

    recorded(run, "failed")

    ((step, value),) = events_of(run)["train/loss"]
    assert step == 1
    assert math.isnan(value)


@pytest.mark.parametrize("cut", [True, False])
def test_a_resume_reads_few_of_many_lines(cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_lines, run = 10_000, make_run(tmp_path, "long")
    rows = [line(1, "eval", accuracy=0.5), *(line(step) for step in range(1, num_lines))]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read: list[bytes] = []

    def counted(raw: bytes) -> dict[str, Any] | None:
        read.append(raw)
        return read_line(raw)

    monkeypatch.setattr(metrics_file, "read_line", counted)
    tracemalloc.start()
    try:
        file = MetricsFile(run, 0)
        newest = file.open(num_lines - 10 if cut else num_lines)
        file.close()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert {one["kind"]: one["step"] for one in newest} == {"train": num_lines - (10 if cut else 1), "eval": 1}
    assert len(read) < 20
    assert peak < run.metrics.stat().st_size + (4 << 20)  # a block that is split into lines
    assert len(run.metrics.read_text().splitlines()) == num_lines - (9 if cut else 0)
