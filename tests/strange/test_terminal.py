"""Text that would command a terminal: it is shown there, and goes to files and pipes as it is."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddp_hpc.base.discretion import escape_controls
from ddp_hpc.cli import main
from ddp_hpc.cli.live import draw_screens
from ddp_hpc.watch.follow import FollowUpdate
from ddp_hpc.watch.status import read_status
from tests.made_run import add_attempt, add_failure, add_log, add_progress, make_run

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31mred\u202egnp.exe\x1b[1;31mcolour\x1b[0m[bold]markup[/bold]\rover"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31mred\u202egnp.execolour[bold]markup[/bold]\rover"


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return what a command shows on a terminal."""
    master, slave = pty.openpty()

    def run(*words: str) -> str:
        with os.fdopen(os.dup(slave), "w", encoding="utf-8") as terminal:
            monkeypatch.setattr(sys, "stdout", terminal)
            monkeypatch.setattr(sys, "stderr", terminal)
            main(list(words))
            monkeypatch.undo()
        told = os.read(master, 65536)
        while select.select([master], [], [], 0.2)[0]:  # the kernel hands it on line by line
            told += os.read(master, 65536)
        return told.decode()

    yield run
    os.close(master)
    os.close(slave)


def test_neither_status_nor_logs_nor_list_nor_an_error_commands_the_terminal(
    typed: Callable[..., str], tmp_path: Path
) -> None:
    run = make_run(tmp_path, f"evil{HOSTILE}".replace("/", "_"))
    add_attempt(run, ending="failed", reason=f"RuntimeError: {HOSTILE}")
    run.console.parent.mkdir()
    run.console.write_text(f"10%\rloss {HOSTILE}\n".replace("\rover", "over"), newline="")
    shown = SHOWN.replace("/", "_")

    status = typed("status", str(run.path))
    logs = typed("logs", str(run.path))
    listed = typed("list", "--runs-dir", str(tmp_path))
    error = typed("status", f"{tmp_path}/none{HOSTILE}")

    assert f"RuntimeError: {SHOWN}" in status
    assert f"loss {SHOWN}\r\n".replace(r"\rover", "over") == logs
    assert f"evil{shown}" in listed
    assert r"none\x1b]0;title" in error
    together = status + logs + listed + error
    assert not any(character in together for character in "\x1b\x07\x9b\u202e")


def test_of_a_progress_bar_a_terminal_shows_the_end(typed: Callable[..., str], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_log(run, "epoch 1:  10%|#\repoch 1: 100%|####\r\nloss 0.5\r\n\r 50%\r100%\nbye\n")

    shown = typed("logs", str(run.path), "--rank", "0", "--attempt", "0")
    of_all = typed("logs", str(run.path), "--all", "--attempt", "0")

    assert shown.splitlines() == ["epoch 1: 100%|####", "loss 0.5", "100%", "bye"]
    assert of_all.splitlines() == [f"[rank 0] {line}" for line in shown.splitlines()]


def test_a_pipe_gets_every_byte(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    run = make_run(tmp_path)
    run.console.parent.mkdir()
    run.console.write_text(f"loss {HOSTILE}\n", newline="")

    assert main(["logs", str(run.path)]) == 0

    assert capfdbinary.readouterr().out == f"loss {HOSTILE}\n".encode()


def test_the_screen_is_drawn_and_text_in_it_commands_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "evil\x1b[2J[red]")
    add_attempt(run)
    add_progress(run, save_error=HOSTILE)
    add_failure(run)
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")

    draw_screens(run, [FollowUpdate(read_status(run, now=1001.0), [], [HOSTILE])], out, is_kept=True)

    assert "\x1b[?25h" in out.getvalue()
    assert f"{SHOWN}\n" in out.getvalue()
    assert r"evil\x1b[2J[red]" in out.getvalue()
    assert "[bold]markup[/bold]" in out.getvalue()
    assert not any(text in out.getvalue() for text in ("\x1b[2J", "\x1b]0", "\x07", "\x9b"))


def test_words_of_all_languages_stay_as_they_are() -> None:
    text = "Ungültig\t世界 \U0001f600 e\u0301 עברית\n"

    assert escape_controls(text) == text


def test_a_terminal_that_does_not_know_a_letter_shows_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "世")
    add_attempt(run, ending="failed", reason="schön 世")
    written = io.BytesIO()
    latin = io.TextIOWrapper(written, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)

    assert main(["status", str(run.path)]) == 0

    latin.flush()
    assert b"sch\xf6n \\u4e16" in written.getvalue()
