"""Ledgers with a line that none of ours has written: it is skipped, that is said once, and the others count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_hpc.run.run_dir.ledger import End, Ending, Ledger, record_end, record_start
from tests.made_run import make_run

ODD = {
    "truncated": b'{"attempt": 1, "job_id": "j',
    "no JSON": b"Segmentation fault",
    "no object": b"[1, 2]",
    "an attempt that is no number": b'{"attempt": "one", "job_id": "1", "host": "a", "pid": 1, "started_at": 1.0}',
    "no attempt": b'{"job_id": "1"}',
    "a time that is a text": b'{"attempt": 1, "job_id": "1", "host": "a", "pid": 1, "started_at": "yesterday"}',
    "nodes that are none": b'{"attempt": 1, "job_id": "1", "host": "a", "pid": 1, "started_at": 1.0, "nodes": null}',
    "a cause of another version": b'{"attempt": 1, "ending": "failed", "exit_code": 1, "cause": "bad luck"}',
    "no text": b"\xff\xfe\x80",
    "deeper than Python reads": b"[" * 100_000,
}


@pytest.mark.parametrize("odd", ODD)
def test_an_odd_line_is_skipped_and_that_is_said_once(
    odd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="1")
    with run.attempts.open("ab") as ledger:
        ledger.write(ODD[odd] + b"\n")
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, reason="rank 1: OSError"))
    record_start(run, attempt=2, job_id="2")

    found = [[(one.attempt, one.job_id, one.reason) for one in Ledger.read(run).attempts] for _ in range(2)]

    assert found == [[(0, "1", "rank 1: OSError"), (2, "2", "")]] * 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert str(run.attempts) in told
    assert "skips this line" in told


def test_zeros_that_a_crash_left_before_a_line_cost_nothing(tmp_path: Path) -> None:
    """As NFS leaves them where a client died before its data reached the server."""
    run = make_run(tmp_path)
    with run.attempts.open("ab") as ledger:
        ledger.write(bytes(4096))
    record_start(run, attempt=0, job_id="1")
    line = run.attempts.read_bytes().lstrip(b"\n\0")
    run.attempts.write_bytes(bytes(512) + line + bytes(100))
    record_start(run, attempt=1, job_id="2")

    assert [one.job_id for one in Ledger.read(run).attempts] == ["1", "2"]


def test_what_another_version_adds_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="1")
    line = json.loads(run.attempts.read_text())
    run.attempts.write_text(json.dumps({**line, "colour": {"blue": 1}}) + "\n")

    assert [one.attempt for one in Ledger.read(run).attempts] == [0]


def test_the_number_of_an_attempt_whose_first_line_is_lost_is_not_given_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_end(run, 4, End(ending=Ending.FAILED, exit_code=1))

    assert Ledger.read(run).attempts == ()
    assert Ledger.read(run).newest_number == 4
