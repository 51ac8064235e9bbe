"""The screen of a run: in any terminal, in a pipe, and gone without a trace after Ctrl-C."""

from __future__ import annotations

import fcntl
import io
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
from pathlib import Path

import pytest

from ddp_hpc.cli.follow_run import show_status_live
from ddp_hpc.cli.live import LEVELS, PLAIN_LEVELS, screen, sparkline
from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.machine_use import MachineUse, append_use
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import QueuedJob, write_queued_job
from ddp_hpc.watch.report.series import ChartPoint
from ddp_hpc.watch.status import read_status
from tests.made_run import make_run
from tests.report.made import BEGIN, Plan, large_run, made_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return large_run(tmp_path / "runs" / "large")


def drawn(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, *, encoding: str = "utf-8", columns: int = 100, lines: int = 90
) -> str:
    """Return what `status --watch` writes to a terminal of this size."""
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding=encoding)
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", str(lines))
    show_status_live(run, out, ask=lambda _job, _at: pytest.fail("the run has ended"))
    out.flush()
    text = (
        written.getvalue().decode(encoding).rpartition("\x1b[1A")[2]
    )  # each screen stands in the place of the last one
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", text).strip("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 100), (20, 3)])
def test_a_screen_never_exceeds_the_terminal(
    width: int, height: int, run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = drawn(run, monkeypatch, columns=width, lines=height).splitlines()

    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_a_screen_shows_progress_losses_and_what_status_prints(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = Ledger.read(run).newest
    assert newest is not None
    use = MachineUse(node_rank=0, node="n", at=BEGIN + 4990, seconds=15.0, gpu_problem="x", num_cpus=4.0, cpu_busy=0.75)
    append_use(run, newest.attempt, use)

    text = drawn(run, monkeypatch)

    for words in ("large  finished", "100%", "step        5000 of 5000", "training 69%", "4 CPUs a node 75% busy"):
        assert words in text
    assert any(level * 3 in text for level in LEVELS)


def test_a_terminal_without_unicode_gets_ascii(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(level * 3 in drawn(run, monkeypatch, encoding="ascii") for level in PLAIN_LEVELS)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_reason_in_letters_that_the_terminal_lacks_is_shown_escaped(encoding: str, tmp_path: Path) -> None:
    run = make_run(tmp_path, "lost")
    record_start(run, attempt=0, job_id="1")
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, reason="no \u4e16 here"))
    main, terminal = pty.openpty()
    argv = [sys.executable, "-m", "ddp_hpc", "status", str(run.path), "--watch"]

    done = subprocess.run(
        argv, stdout=terminal, stderr=subprocess.PIPE, check=False, env={**os.environ, "PYTHONIOENCODING": encoding}
    )

    assert done.stderr == b""
    assert b"no \\u4e16 here" in os.read(main, 65536)
    os.close(main)
    os.close(terminal)


def test_a_sparkline_falls_as_the_values_fall() -> None:
    falling = [ChartPoint(step, 1 / (step + 1)) for step in range(500)]

    line = sparkline(falling, 20, PLAIN_LEVELS)

    assert len(line) == 20
    assert [*line] == sorted(line, key=PLAIN_LEVELS.index, reverse=True)
    assert sparkline([ChartPoint(1, 3.0)], 20) == sparkline([ChartPoint(1, 5.0)], 20)
    assert sparkline([], 20) == ""


def test_a_run_in_the_queue_and_one_without_metrics_have_a_screen(tmp_path: Path) -> None:
    queued, begun = make_run(tmp_path, "queued"), make_run(tmp_path, "begun")
    write_queued_job(queued, QueuedJob(job_id="7", attempt=0, at=BEGIN, backend="local"))
    record_start(begun, attempt=0, job_id="1")

    for each in (queued, begun):
        status = read_status(each, now=BEGIN)
        assert screen(status, {}, "", now=BEGIN, word=each.name)[0].startswith(f"{each.name}  ")


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


def test_a_terminal_without_commands_gets_lines(tmp_path: Path) -> None:
    run = _alive(tmp_path / "runs" / "one")
    master, slave = pty.openpty()
    argv = [sys.executable, "-m", "ddp_hpc", "status", str(run.path), "--watch"]
    with subprocess.Popen(
        argv, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env={**os.environ, "TERM": "dumb"}
    ) as process:
        told = _read_until(master, b"running  step 300 of 300")
        process.send_signal(signal.SIGINT)
        process.wait(30)

    assert b"\x1b" not in told
    os.close(master)
    os.close(slave)
