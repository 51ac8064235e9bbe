"""`ddp-hpc why`: one screen from a run directory, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.errors import UnreadableError
from ddp_hpc.cli import main
from ddp_hpc.run.requeue import MESSAGE_BY_NEXT
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Next, record_end, record_start
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.watch import status
from tests.made_run import add_attempt, add_checkpoint, add_failure, add_log, add_progress, make_run

TRACEBACK = 'Traceback (most recent call last):\n  File "/home/me/model.py", line 31, in forward\n    x\nKeyError: 7\n'
RESET = "RuntimeError: Connection closed by peer [127.0.0.1]:1234"
NOISE = "\x1b[31m 10%|#   | 1/10\r 20%|##  | 2/10\x1b[0m\n\xff\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Return a run in `runs`, here, whose only attempt failed on rank 1 of 2."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs")
    end_badly(run, 0)
    add_failure(run, rank=0, at=0.5, exception=RESET, is_secondary=True, exception_type="RuntimeError")
    add_failure(run, rank=1, exception="KeyError: 7", traceback=TRACEBACK, exception_type="KeyError")
    add_log(run, NOISE + TRACEBACK, rank=1)
    add_log(run, f"{RESET}\n", rank=0)
    return run


def end_badly(run: RunDir, attempt: int) -> None:
    record_start(run, attempt=attempt, job_id="1")
    end = End(ending=Ending.FAILED, exit_code=1, reason="rank 1: KeyError: 7", cause=Cause.WORKER_CRASHED)
    record_end(run, attempt, end)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(said(capsys, *words, "--json"))
    return record


def test_one_screen_names_root_evidence_and_what_to_do(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "why", "digits")

    assert "why       an exception in the user's code  [user-exception; from the run's records]" in out
    assert "root      rank 1 on node1, at step 7" in out
    assert "at        /home/me/model.py:31 in forward" in out
    assert "root (rank 1, logs/attempt-0/rank-1.log:6): KeyError: 7" in out
    assert "cascade (rank 0, logs/attempt-0/rank-0.log:1): RuntimeError: Connection closed by peer" in out
    assert "others    1 other rank lost the connection to a peer" in out
    assert "then      the run ended with this attempt" in out
    assert len(out.splitlines()) <= 24


def test_a_run_that_may_run_on_is_not_said_to_have_failed_whatever_its_log_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs")
    add_attempt(run)
    add_log(run, TRACEBACK)  # which the script has caught and printed

    out = said(capsys, "why", "digits")

    assert "no end of this attempt is recorded: the run is " in out
    assert "in logs   rank 0, logs/attempt-0/rank-0.log:4: KeyError: 7" in out
    assert "exception in the user's code" not in out
    assert "to do" not in out
    assert as_json(capsys, "why", "digits")["failure"] == "unknown"


def test_json_has_the_same_and_a_fingerprint(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    record = as_json(capsys, "why", "digits")

    assert (record["failure"], record["rank"], record["host"], record["num_cascades"]) == (
        "user-exception",
        1,
        "node1",
        1,
    )
    assert record["evidence"][0] == {
        "role": "root",
        "rank": 1,
        "place": "logs/attempt-0/rank-1.log:6",
        "text": "KeyError: 7",
    }
    assert len(record["fingerprint"]) == 12


def test_a_run_that_was_moved_and_has_lost_its_logs_is_explained_by_its_records(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for log in run.attempt_logs(0).iterdir():
        log.unlink()
    moved = run.path.rename(run.path.with_name("moved"))

    record = as_json(capsys, "why", str(moved))

    assert (record["failure"], record["rank"], record["evidence"][0]["place"]) == ("user-exception", 1, None)


def test_without_a_number_the_newest_attempt_that_ended_is_explained(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    add_attempt(run, 1)

    assert as_json(capsys, "why", "digits")["attempt"] == 0
    assert as_json(capsys, "why", "digits", "--attempt", "1")["failure"] == "unknown"
    assert "no end of this attempt is recorded" in said(capsys, "why", "digits", "--attempt", "1")


def test_a_run_that_finished_has_nothing_to_explain_but_its_earlier_failure(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    add_attempt(run, 1, ending=Ending.FINISHED)

    out = said(capsys, "why", "digits")

    assert "nothing failed: finished" in out
    assert "`ddp-hpc why digits --attempt 0`" in out


def test_lines_of_the_jobs_log_count_only_for_the_attempt_that_they_are_of(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    oom = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed.\n"
    run.console.write_text(f"hello\nended: rank 1\n{oom}ended: rank 0: killed by SIGKILL\n")
    end_badly(run, 1)
    add_failure(run, 1, rank=0, exception="killed by SIGKILL", signal=9)
    end_badly(run, 2)
    add_failure(run, 2, rank=0, exception="killed by SIGKILL", signal=9)
    with run.console.open("a") as file:
        file.write("ended: rank 0: killed by SIGKILL\n")

    assert as_json(capsys, "why", "digits", "--attempt", "1")["failure"] == "host-memory"
    assert as_json(capsys, "why", "digits", "--attempt", "2")["failure"] == "killed"


@pytest.mark.parametrize("follows", [one for one in Next if one])
def test_lines_of_the_jobs_log_of_an_attempt_that_the_run_went_on_after_prove_nothing_of_the_next_one(
    run: RunDir, follows: Next, capsys: pytest.CaptureFixture[str]
) -> None:
    crash, killed = (f"srun: error: node1: task 1: {how}\n" for how in ("Segmentation fault", "Killed"))
    run.console.write_text(f"{crash}note: rank 1; {MESSAGE_BY_NEXT[follows]}\n{killed}ended: rank 1\n")
    for attempt in (0, 1):
        record_start(run, attempt=attempt, job_id="1", nodes=("node1",))
        end = End(ending=Ending.FAILED, exit_code=1, reason="rank 1", cause=Cause.WORKER_CRASHED)
        record_end(run, attempt, end)
        for path in (run.rank_error(attempt, 0), run.rank_error(attempt, 1)):
            path.unlink(missing_ok=True)
        add_failure(run, attempt, rank=0, exception=RESET, is_secondary=True, exception_type="RuntimeError")
        add_log(run, "", attempt=attempt, rank=0)
        run.rank_log(attempt, 1).write_text("")

    records = [as_json(capsys, "why", "digits", "--attempt", str(attempt)) for attempt in (0, 1)]

    assert [(record["failure"], record["rank"]) for record in records] == [("native-crash", 1), ("killed", 1)]


def test_the_status_of_a_failed_run_names_the_command(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert "why         `ddp-hpc why digits` explains it" in said(capsys, "status", "digits")


def test_what_to_do_says_from_which_step_the_run_goes_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def to_do() -> str:
        return str(as_json(capsys, "why", "digits")["to_do"])

    assert to_do().endswith("submit the run again: it has no checkpoint, so it starts from the beginning.")

    add_progress(run, saves=0)
    assert to_do().endswith(
        "submit the run again: it starts the script again, and no file that `script.progress` names shows a save of this run."
    )

    add_checkpoint(run, 20)
    assert to_do().endswith("submit the run again: it continues from step 20.")

    def fail(_: RunDir) -> list[int]:
        raise UnreadableError("no answer")

    monkeypatch.setattr(status, "committed_steps", fail)
    unknown = f"{run.checkpoints} cannot be read now, so from which step it goes on is not known."
    assert to_do().endswith(f"submit the run again: {unknown}")


def test_status_and_why_say_first_what_a_rank_said_before_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs")
    record_start(run, attempt=0, job_id="1")
    reason = "the job reached its time limit"
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, reason=reason, cause=Cause.TIME_LIMIT))

    assert f"reason      {reason}\n" in said(capsys, "status", "digits")

    add_log(run, TRACEBACK.replace("KeyError: 7", "OSError: AF_UNIX path too long"))
    title = "a path is too long for a Unix socket"
    both = f"{title}: OSError: AF_UNIX path too long; then: {reason}"
    assert f"reason      {both}\n" in said(capsys, "status", "digits")
    assert as_json(capsys, "status", "digits")["reason"] == both
    out = said(capsys, "why", "digits")
    assert f"why       {title}  [socket-path; from a text in a log]" in out
    assert "time_limit_min" not in out
    assert f"then      {reason}; the run ended with this attempt" in out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("digits", "--attempt", "9"), "Run 'digits' has no attempt 9. Its attempts: 0."),
        (("empty",), "Run 'empty' has not begun an attempt."),
    ],
)
def test_what_is_not_there_is_an_error(
    run: RunDir, words: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(run.path.parent, "empty")

    assert main(("why", *words)) == 2
    assert error in capsys.readouterr().err
