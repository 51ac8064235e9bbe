"""Sweeps on this machine, from the command line to the table."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import ddp_hpc
from ddp_hpc.base import processes
from ddp_hpc.base.errors import ConfigError, RunBusyError
from ddp_hpc.cli import main
from ddp_hpc.launch.sweep.manage_sweep import continue_sweep, delete_sweep
from ddp_hpc.launch.sweep.points import make_points, parse_axis
from ddp_hpc.launch.sweep.run_points import run_here, run_points
from ddp_hpc.launch.sweep.sweep_dir import (
    Sweep,
    SweepDir,
    append_record,
    failed_attempts,
    is_being_sent,
    lock_sending,
    make_sweep,
    read_sweep,
    record_continued,
)
from ddp_hpc.run.config.resolve import resolve
from ddp_hpc.run.run_dir import ledger
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.spec import RunSpec
from tests.made_run import add_attempt, add_progress

SCRIPT = """
import pathlib, sys
out = pathlib.Path("out"); out.mkdir(exist_ok=True)
with open(out / "order", "a") as file:
    file.write(sys.argv[1] + " ")
sys.exit(sys.argv[1] == "2" and not pathlib.Path("mended").exists() and "this point fails")
"""
WORDS = ("name=grid", "resources.workers_per_node=1", "restart.max_no_progress=1", "script.start=exec")
COMMAND = ("--", "python", "train.py", "{number}")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)


def submit(*words: str) -> int:
    return main(["submit", *WORDS, "--cluster", "local", *words, *COMMAND])


@pytest.fixture
def sweep_dir(tmp_path: Path) -> SweepDir:
    return SweepDir(tmp_path / "runs" / "grid")


@pytest.mark.long
def test_points_run_one_after_another_and_the_one_that_failed_runs_again_alone(
    sweep_dir: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit("--sweep", "number=1..3") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("grid: 3 points to run on this machine")
    assert [line.partition(" failed")[0] for line in lines if "002" not in line and " failed:" in line] == [
        "001-number-2"
    ]
    assert "3 points: 1 failed, 2 finished" in lines
    assert lines[-1] == "start failed points again: ddp-hpc sweep continue grid --failed"
    sweep = read_sweep(sweep_dir)
    assert list(failed_attempts(sweep)) == [1]
    assert Path("out/order").read_text().split() == ["1", "2", "3"]
    Path("mended").touch()

    assert main(["sweep", "continue", "grid", "--failed", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["states"] == {"finished": 3}
    assert Path("out/order").read_text().split()[-1] == "2"
    assert len(Ledger.read(sweep_dir.run(sweep.points[0])).attempts) == 1
    assert main(["sweep", "continue", "grid"]) == 0
    assert "no point is left" in capsys.readouterr().out
    assert main(["sweep", "follow", "grid"]) == 0


STAMPS = """
import pathlib, signal, sys, time
begun, is_first = time.time(), not pathlib.Path("interrupted").exists()
for _ in range(300 if is_first else 30):
    time.sleep(0.1)
    if is_first and pathlib.Path("asked").exists():
        sys.exit(99)
open(f"stamps-{sys.argv[1]}", "w").write(f"{begun} {time.time()}")
"""


@pytest.mark.long
def test_ctrl_c_stops_the_points_that_run_and_continue_goes_on_with_no_more_at_once_than_asked_for(
    sweep_dir: SweepDir, tmp_path: Path
) -> None:
    Path("train.py").write_text(
        STAMPS.replace(
            "begun, is_first", 'signal.signal(signal.SIGTERM, lambda *_: open("asked", "w"))\nbegun, is_first'
        )
    )
    words = [*WORDS, "--cluster", "local", "--sweep", "number=1..4", "--at-most", "2", *COMMAND]
    argv = [sys.executable, "-m", "ddp_hpc", "submit", *words]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "2 running" not in process.stdout.readline():
            assert process.poll() is None
        assert is_being_sent(sweep_dir)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    assert "To go on: ddp-hpc sweep continue grid" in said
    assert not is_being_sent(sweep_dir)
    newest = [Ledger.read(sweep_dir.run(point)).newest for point in read_sweep(sweep_dir).points]
    assert [one is not None and one.is_last and one.ending for one in newest] == ["stopped", "stopped", False, False]
    Path("interrupted").touch()

    assert main(["sweep", "continue", "grid"]) == 0

    spans = [tuple(map(float, path.read_text().split())) for path in tmp_path.glob("stamps-*")]
    assert len(spans) == 4
    assert max(sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans) == 2


def test_a_dry_run_prints_the_points_and_makes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--sweep", "number=1..3", "--sweep", "seed=0..1", "--dry-run") == 0

    out = capsys.readouterr().out
    assert "would start 6 points" in out
    assert "# 005-number-3-seed-1\n" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--zip",), "`--zip` is for sweeps"),
        (("--at-most", "2"), "`--at-most` is for sweeps"),
        (("--sweep", "number=1..3", "--fresh"), "`--fresh` is for one run"),
        (("--sweep", "lr=1..3"), "point 0 (lr=1)"),
        (("--sweep", "number=1..3", "--sweep", "resources.nodes=2,3"), "`resources.nodes` cannot be swept"),
    ],
)
def test_what_no_sweep_can_be_is_refused_before_anything_is_made(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*words) == 2

    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def made_sweep(sweep_dir: SweepDir) -> None:
    """Make a sweep of four points of which two have a run."""
    base = resolve(None, ["name=grid"], {}, command=["python", "train.py", "{number}"])
    points = make_points([parse_axis("number=1,2"), parse_axis("train.lr=0.1,0.2")])
    make_sweep(Sweep(dir=sweep_dir, points=points, backend="local"), base)
    for point, accuracy, ending in ((points[1], 0.7, "finished"), (points[2], 0.9, "failed")):
        run = sweep_dir.run(point)
        run.path.mkdir()
        run.config.write_text(f"name: {point.name}\n")
        add_attempt(run, ending=ending)
        add_progress(run, metrics={"accuracy": accuracy})


def test_the_points_are_listed_with_what_differs_sorted_by_a_metric(
    sweep_dir: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    made_sweep(sweep_dir)

    assert main(["list", "grid", "--sort", "accuracy", "--reverse"]) == 0
    header, *rows, last = capsys.readouterr().out.splitlines()
    assert header.split()[-2:] == ["number", "lr"]
    assert [row.split()[0][:3] for row in rows] == ["002", "001", "000", "003"]
    assert rows[0].split()[-2:] == ["2", "0.1"]
    assert last == "4 points: 2 not submitted, 1 finished, 1 failed"

    assert main(["list", "grid", "--failed", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["run"], one["state"], one["set"]) == ("002-number-2-lr-0.1", "failed", {"number": "2", "train.lr": 0.1})
    assert main(["list", "grid", "--sort", "train.lr"]) == 0
    assert [row.split()[0][:3] for row in capsys.readouterr().out.splitlines()[1:-1]] == ["000", "002", "001", "003"]
    assert main(["list", "grid", "--sort", "speed"]) == 2
    capsys.readouterr()
    assert main(["list"]) == 0
    assert "(`ddp-hpc list NAME`): grid\n" in capsys.readouterr().err
    assert main(["status", "grid/001-number-1-lr-0.2"]) == 0
    assert "finished" in capsys.readouterr().out


def test_a_command_for_one_run_says_how_to_name_a_point_and_delete_says_what_it_deletes(
    sweep_dir: SweepDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_sweep(sweep_dir)

    assert main(["status", "grid"]) == 2
    assert "`ddp-hpc list grid`" in capsys.readouterr().err
    assert main(["submit", *WORDS, "--cluster", "local", *COMMAND]) == 2
    assert "grid is a sweep" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="grid is a sweep"):
        ddp_hpc.submit(RunSpec(name="grid"), cluster="local")

    there = sweep_dir.run(read_sweep(sweep_dir).points[3])
    there.path.mkdir()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ledger, "host_name", lambda: "workstation-a")
        add_attempt(there)
    assert main(["delete", "grid", "--yes"]) != 0
    assert "was started on workstation-a, and this host" in capsys.readouterr().err
    shutil.rmtree(there.path)

    assert main(["delete", "grid", "--yes"]) == 0

    assert "a sweep of 4 points; 2 of them have a run" in capsys.readouterr().out
    assert not sweep_dir.path.exists()


def test_a_point_that_was_running_when_its_machine_went_down_is_started_again_but_none_that_runs_or_has_ended(
    sweep_dir: SweepDir,
) -> None:
    made_sweep(sweep_dir)
    sweep = read_sweep(sweep_dir)
    lost = sweep_dir.run(sweep.points[3])
    lost.path.mkdir()
    add_attempt(lost)

    assert continue_sweep(sweep_dir, {}, limits={}).numbers == [0, 3]

    lock_fd = processes.take_lock(lost.lock)
    assert lock_fd is not None
    with pytest.raises(RunBusyError, match=r"003-number-2-lr-0\.2 of grid still runs on this machine"):
        continue_sweep(sweep_dir, {}, limits={})
    processes.release_lock(lock_fd)


def test_of_two_commands_one_runs_the_points_of_a_sweep(sweep_dir: SweepDir) -> None:
    made_sweep(sweep_dir)

    with lock_sending(sweep_dir, "busy"), pytest.raises(RunBusyError, match="runs them on this machine"):
        continue_sweep(sweep_dir, {}, limits={})
    with (
        lock_sending(sweep_dir, "busy"),
        pytest.raises(RunBusyError, match="Another command runs"),
        run_here(sweep_dir, [0], {}),
    ):
        pass
    with lock_sending(sweep_dir, "busy"), pytest.raises(RunBusyError, match="submits or runs its points"):
        delete_sweep(sweep_dir, {})


@pytest.mark.long
def test_points_that_are_refused_on_this_machine_have_a_record_that_says_why(
    sweep_dir: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").unlink()
    assert submit("--sweep", "number=1..2", "--wait") == 1
    capsys.readouterr()

    assert main(["list", "grid", "--failed"]) == 0

    assert "2 refused" in capsys.readouterr().out


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_no_other_point_starts_on_this_machine_once_enough_have_failed_or_the_sweep_is_cancelled(
    sweep_dir: SweepDir, is_cancelled: bool
) -> None:
    made_sweep(sweep_dir)
    if is_cancelled:
        append_record(sweep_dir, cancelled=True)
    else:
        record_continued(sweep_dir, is_cancelled=False, forgiven={}, limits={"stop_after_failures": 1})

    run_points(sweep_dir, [0, 3], {}, threading.Event())

    assert not sweep_dir.run(read_sweep(sweep_dir).points[0]).path.exists()


def test_a_point_that_cannot_be_made_is_named_and_the_others_are_started(
    sweep_dir: SweepDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_words: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ddp_hpc.launch.submission.run_dir_setup.make_run_dir", fail)
    base = resolve(None, ["name=grid"], {}, command=COMMAND[1:])
    points = make_points([], [{"number": 1}, {"number": 2, "seed": "no number"}, {"number": 3}])
    make_sweep(Sweep(dir=sweep_dir, points=points, backend="local"), base)

    run_points(sweep_dir, [0, 1, 2], {}, threading.Event())

    log = capsys.readouterr().err
    assert [f"point {number} (number={number + 1}" in log for number in range(3)] == [True] * 3
    assert "No space left on device" in log
    assert "`seed` is 'no number'" in log
