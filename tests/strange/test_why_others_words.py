"""Failures of programs that print their own way: other languages, other frames around a traceback, texts that look like others."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.failure_reports import WorkerFailure
from ddp_hpc.run.run_dir.ledger import Cause
from ddp_hpc.watch.why.findings import AttemptFacts, Verdict
from ddp_hpc.watch.why.lines import LogLine, clean
from ddp_hpc.watch.why.signatures import match_exception
from ddp_hpc.watch.why.verdict import verdict_of
from tests.made_run import made_attempt


def verdict_on(text: str, *, exit_code: int = 1) -> Verdict:
    """Return the verdict on a script of one rank that printed this and exited."""
    attempt = made_attempt(cause=Cause.WORKER_CRASHED)
    failure = WorkerFailure(rank=0, host="n", at=0.0, step=0, exception="", log="", of_script=True, exit_code=exit_code)
    lines = [LogLine(Path("rank-0.log"), number, clean(line)) for number, line in enumerate(text.splitlines())]
    return verdict_of(AttemptFacts(attempt=attempt, failures=[failure], logs={0: lines}))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar: '/scratch/x'", "disk-full"),
        ("OSError: [Errno 116] Veraltete Dateizugriffsnummer (file handle)", "stale-mount"),
        ("socket.gaierror: [Errno -2] Der Name oder der Dienst ist nicht bekannt", "dns"),
        ("OSError: [Errno 98] Adresse wird bereits verwendet", "port"),
    ],
)
def test_the_systems_messages_count_in_every_language(text: str, name: str) -> None:
    found = match_exception(text)

    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "text",
    [
        "ValueError: the planner found No space left on device 3 for this layer",
        "PlanError: Disk quota exceeded is the title of chapter 7",
        "AssertionError: Broken pipe in image 12, Connection reset by peer review",
        "KeyError: 'Stale file handle'",
        "mylib.errors.LayoutError: Expected all tensors on one device",
    ],
)
def test_a_users_message_that_looks_like_the_systems_has_no_class(text: str) -> None:
    assert match_exception(text) is None


def test_a_traceback_in_a_frame_of_its_own_is_read() -> None:
    framed = "╭─ Traceback (most recent call last) ─╮\n│ train.py:3 in <module>              │\n╰─────────────────────────────────────╯\nZeroDivisionError: division by zero\n"

    found = verdict_on(framed)

    assert (found.failure, found.detail) == ("user-exception", "ZeroDivisionError: division by zero")


def test_bars_and_colours_do_not_hide_the_exception() -> None:
    bars = "".join(f"\r{number}%|##   | {number}/100" for number in range(99))
    text = f'{bars}\r\n\x1b[31mTraceback (most recent call last):\x1b[0m\n  File "t.py", line 3, in f\n    1 / 0\n\x1b[31mZeroDivisionError: division by zero\x1b[0m\n'

    found = verdict_on(text)

    assert (found.failure, found.detail, found.place) == (
        "user-exception",
        "ZeroDivisionError: division by zero",
        "t.py:3 in f",
    )
