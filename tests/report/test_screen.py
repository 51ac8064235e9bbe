"""The screen of a run: in any terminal, in a pipe, and gone without a trace after Ctrl-C."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.run.run_dir.ledger import record_start
from ddp_hpc.run.run_dir.machine_use import MachineUse, append_use
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, write_queued_job
from ddp_hpc.watch.report.looking import Looker
from ddp_hpc.watch.report.screen import PLAIN_LEVELS, RunScreen, screen, sparkline
from ddp_hpc.watch.report.series import ChartPoint
from tests.made_run import make_run
from tests.report.made import BEGIN, Plan, large_run, line_of, made_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return large_run(tmp_path / "runs" / "large")


def seen(run: RunDir) -> RunScreen:
    return Looker(run).look(BEGIN + 5000)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 100), (20, 3), (1, 1)])
def test_a_screen_never_exceeds_the_terminal(width: int, height: int, run: RunDir) -> None:
    lines = screen(seen(run), width=width, height=height)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_screen_shows_progress_time_phases_and_the_ranks_that_others_wait_for(run: RunDir) -> None:
    text = "\n".join(screen(seen(run), width=100, height=90))

    for words in ("large  finished", "5,000 of 5,000, 100 %", "training 69 %", "backward 58 %", "(64 ranks", "rank 63"):
        assert words in text


def test_a_screen_shows_how_busy_the_machines_are(run: RunDir) -> None:
    newest = Looker(run).look(BEGIN).status.attempt
    assert newest is not None
    use = MachineUse(node_rank=0, node="n", at=BEGIN + 4990, seconds=15.0, gpu_problem="x", num_cpus=4.0, cpu_busy=0.75)
    append_use(run, newest, use)

    lines = screen(seen(run), width=100, height=90)

    assert "machines    use of the GPUs is not known (x)" in lines
    assert "            4 CPUs a node 75% busy, 10 s ago" in lines


def test_a_terminal_without_unicode_gets_ascii(run: RunDir) -> None:
    assert "\n".join(screen(seen(run), width=79, height=24, is_plain=True)).isascii()


def test_a_sparkline_falls_as_the_values_fall() -> None:
    falling = [ChartPoint(step, 1 / (step + 1)) for step in range(500)]

    line = sparkline(falling, 20, PLAIN_LEVELS)

    assert len(line) == 20
    assert [*line] == sorted(line, key=PLAIN_LEVELS.index, reverse=True)
    assert sparkline([ChartPoint(1, 3.0)], 20) == sparkline([ChartPoint(1, 5.0)], 20)
    assert sparkline([], 20) == ""


def test_each_look_has_the_losses_of_that_moment(tmp_path: Path) -> None:
    run = made_run(tmp_path / "one", [Plan(first=0, reached=300, ending="finished")])
    looker = Looker(run)
    before = len(looker.look(BEGIN).loss)
    with run.metrics.open("a") as file:
        file.write(line_of(kind="train", step=310, loss=0.5, at=1.0))
        file.write(line_of(kind="train", step=320, loss=None, at=2.0))

    after = looker.look(BEGIN).loss

    assert before == 30
    assert [point.step for point in after][-2:] == [300, 310]


def test_a_run_in_the_queue_and_one_without_metrics_have_a_screen(tmp_path: Path) -> None:
    queued, begun = make_run(tmp_path, "queued"), make_run(tmp_path, "begun")
    write_queued_job(queued, QueuedJob(job_id="7", attempt=0, at=BEGIN, backend="local"))
    record_start(begun, attempt=0, job_id="1")

    for each in (queued, begun):
        assert screen(seen(each), width=80, height=24)[0].startswith(each.name)


def test_a_pipe_gets_text_without_control_characters(run: RunDir) -> None:
    (run.path / "evil\x1b[2J").mkdir()
    argv = [sys.executable, "-m", "ddp_hpc", "status", str(run.path), "--watch"]

    done = subprocess.run(argv, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})

    assert b"\x1b" not in done.stdout
    assert done.stdout.isascii()


def _alive(folder: Path) -> RunDir:
    """Return a run that another host works on, and that has written something just now."""
    run = made_run(folder, [Plan(first=0, reached=300, ending=None)])
    record = json.loads(run.progress.read_text())
    run.progress.write_text(json.dumps({**record, "at": time.time()}))
    return run


def _read_until(fd: int, text: bytes) -> bytes:
    found = b""
    while text not in found:
        assert select.select([fd], [], [], 30)[0], found
        found += os.read(fd, 4096)
    return found


def test_ctrl_c_ends_the_watching_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    run = _alive(tmp_path / "runs" / "one")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    argv = [sys.executable, "-m", "ddp_hpc", "status", str(run.path), "--watch"]
    with subprocess.Popen(argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True) as process:
        drawn = _read_until(master, b"\x1b[1A")  # the second screen, in the place of the first
        process.send_signal(signal.SIGINT)
        drawn += _read_until(master, b"\x1b[?25h")
        code = process.wait(30)

    assert code == 0
    assert termios.tcgetattr(slave) == before
    # Nothing was set but the cursor, which is there again: no other screen, no colours.
    assert set(re.findall(rb"\x1b\[\?[0-9]+[a-z]", drawn)) == {b"\x1b[?25l", b"\x1b[?25h"}
    assert b"m" not in {part[:1] for part in drawn.split(b"\x1b[")[1:]}
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("columns", ["1", "50", "300"])
def test_in_a_file_no_line_is_printed_that_is_longer_than_columns(
    columns: str, run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    assert main(["status", str(run.path), "--watch"]) == 0

    longest = max(map(len, capsys.readouterr().out.splitlines()))
    assert max(1, int(columns) - 20) <= longest <= int(columns)


def test_a_terminal_without_commands_gets_one_screen_below_the_other(tmp_path: Path) -> None:
    run = _alive(tmp_path / "runs" / "one")
    master, slave = pty.openpty()
    argv = [sys.executable, "-m", "ddp_hpc", "status", str(run.path), "--watch"]
    with subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "dumb"}
    ) as process:
        drawn = _read_until(master, b"\r\n\r\none  ")
        process.send_signal(signal.SIGINT)
        process.wait(30)

    assert b"\x1b" not in drawn
    os.close(master)
    os.close(slave)


def test_the_longest_reason_is_cut(run: RunDir) -> None:
    one = seen(run)

    lines = screen(replace(one, status=replace(one.status, reason="x" * 500)), width=79, height=24)

    assert max(map(len, lines)) <= 79
