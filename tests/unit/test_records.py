"""The records a run keeps of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end, record_start
from ddp_hpc.run.run_dir.records import read_progress, write_progress
from ddp_hpc.watch.status import stop_text
from tests.made_run import make_run, progress


def test_an_attempt_is_its_start_and_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="17")
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, reason="rank 1: OSError"))
    record_start(run, attempt=1, job_id="18")

    first, second = Ledger.read(run).attempts

    assert (first.attempt, first.job_id, first.ending, first.exit_code, first.reason) == (
        0, "17", "failed", 1, "rank 1: OSError",
    )  # fmt: skip
    assert (second.attempt, second.job_id, second.ending, second.ended_at) == (1, "18", None, None)


def test_a_ledger_of_another_version_or_torn_by_a_crash_is_still_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    append_json_line(run.attempts, {"attempt": 5, "ending": "finished"})  # its start is lost
    record_start(run, attempt=6, job_id="19")
    append_json_line(run.attempts, {"attempt": 6, "colour": "blue"})
    with run.attempts.open("a") as file:
        file.write('{"attempt": 7, "star')

    attempts = Ledger.read(run).attempts

    assert [(entry.attempt, entry.job_id) for entry in attempts] == [(6, "19")]


def test_a_run_that_never_started_has_no_attempts_and_no_progress(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    assert Ledger.read(run).attempts == ()
    assert read_progress(run) is None


def test_progress_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    written = progress(step=7, save_error="OSError: no space left", metrics={"accuracy": 0.5})

    write_progress(run, written)

    assert read_progress(run) == written


@pytest.mark.parametrize(
    ("text", "is_readable"),
    [
        ("", False),
        ("{", False),
        ('{"step": 3}', False),
        ("[]", False),
        ('{"attempt": 1, "save_error": "\udc80"}', True),
    ],
    ids=["empty", "torn", "of another version", "no object", "no UTF-8"],
)
def test_progress_that_is_none_is_no_error(text: str, is_readable: bool, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.progress.write_bytes(text.encode(errors="surrogateescape"))

    assert (read_progress(run) is not None) is is_readable


@pytest.mark.parametrize(
    ("known", "effect"),
    [
        (None, "it has no checkpoint, so it starts from the beginning"),
        ({}, "it continues from the checkpoint that it writes now"),  # a recipe saves when it stops
        ({"saves": 0}, "it starts the script again, and no file that `script.progress` names shows a save of this run"),
        ({"saves": 2}, "it starts the script again, with what it has saved"),
    ],
)
@pytest.mark.parametrize(
    ("then", "told"),
    [("end", "was asked to stop. Submit it again"), ("requeue", "go back to the queue. When its job starts again")],
)
def test_a_stop_promises_only_what_is_known_to_be_saved(
    then: Literal["end", "requeue"], told: str, known: dict[str, Any] | None, effect: str, tmp_path: Path
) -> None:
    run = make_run(tmp_path)
    if known is not None:
        write_progress(run, progress(**{"last_checkpoint": None, **known}))

    assert stop_text(run, then=then).endswith(f"{told}: {effect}.")
