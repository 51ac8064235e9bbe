"""The ledger as one object, and its words, which are texts on disk and in messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base import exit_codes
from ddp_hpc.base.durable import append_json_line
from ddp_hpc.run.run_dir import ledger
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger, Next, RootFailure, record_end, record_start
from ddp_hpc.run.run_dir.records import QueuedJob, attempts_of_submission
from tests.made_run import make_run

OLD = (
    '{"attempt":3,"job_id":"7","host":"node1","pid":12,"pid_start":34,"started_at":1.5,"first_step":8,'
    '"cluster":"slurm","nodes":["node1","node2"],"ends_at":9.5,"restart":1}\n'
    '{"attempt":3,"ending":"failed","exit_code":1,"reason":"rank 1: OSError","cause":"node failed",'
    '"last_step":16,"next":"requeue","failed_nodes":["node2"],"ended_at":2.5}\n'
)
"""As it was written when endings, causes and what follows were plain texts."""


def test_a_ledger_of_plain_texts_is_read_as_words(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.attempts.write_text(OLD)

    newest = Ledger.read(run).newest

    assert newest is not None
    assert (newest.ending, newest.cause, newest.next) == (Ending.FAILED, Cause.NODE_FAILED, Next.REQUEUE)
    assert all(isinstance(word, str) for word in (newest.ending, newest.cause, newest.next))
    assert type(newest.cause) is Cause


def test_words_are_written_as_plain_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr("time.time", iter([1.5, 2.5]).__next__)
    monkeypatch.setattr(ledger, "host_name", lambda: "node1")
    monkeypatch.setattr("os.getpid", lambda: 12)
    monkeypatch.setattr(ledger, "start_ticks", lambda _: 34)
    end = End(
        ending=Ending.FAILED,
        exit_code=1,
        reason="rank 1: OSError",
        cause=Cause.NODE_FAILED,
        last_step=16,
        next=Next.REQUEUE,
        failed_nodes=("node2",),
    )

    nodes = ("node1", "node2")
    record_start(run, attempt=3, job_id="7", first_step=8, cluster="slurm", nodes=nodes, ends_at=9.5, restart=1)
    record_end(run, 3, end)

    written = [line.strip(" ") for line in run.attempts.read_text().splitlines() if line.strip()]
    assert written == OLD.splitlines()


@pytest.mark.parametrize("word", [*Ending, *Cause, *Next], ids=lambda word: f"{type(word).__name__}.{word.name}")
def test_a_word_is_its_text_wherever_it_is_printed(word: Ending | Cause | Next) -> None:
    assert f"{word}" == f"{word:s}" == str(word) == str(word.value)
    assert json.dumps({"is": word}) == json.dumps({"is": word.value})
    assert {word.value: 1}[word] == 1


def test_an_end_without_a_cause_leaves_what_an_earlier_line_says_of_it(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="7")
    root = RootFailure(fingerprint="f1", entity="train_data[1]", failed_step=0)
    known = End(
        ending=Ending.FAILED, cause=Cause.NODE_FAILED, last_step=1, next=Next.SLURM, failed_nodes=("n",), root=root
    )
    record_end(run, 0, known)
    record_end(run, 0, End(ending=Ending.FENCED, exit_code=exit_codes.FENCED, reason="newer"))

    [fenced] = Ledger.read(run).attempts
    assert fenced.end is not None
    how: dict[str, Any] = {
        "ending": Ending.FENCED,
        "exit_code": exit_codes.FENCED,
        "reason": "newer",
        "ended_at": fenced.ended_at,
    }
    assert fenced.end == replace(known, **how)

    record_end(run, 0, End(ending=Ending.FAILED, cause=Cause.SUPERVISOR_DIED))  # it says that nothing follows
    [last] = Ledger.read(run).attempts
    assert (last.cause, last.next, last.failed_nodes, last.root) == (Cause.SUPERVISOR_DIED, "", ("n",), root)


def test_an_end_that_names_no_exit_code_is_a_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="7")
    append_json_line(run.attempts, {"attempt": 0, "ending": "failed", "cause": "worker crashed"})

    newest = Ledger.read(run).newest

    assert newest is not None
    assert newest.end is not None
    assert newest.exit_code == newest.end.exit_code == exit_codes.FAILED


def test_a_start_is_written_with_no_field_that_an_attempt_has_not(tmp_path: Path) -> None:
    run = make_run(tmp_path)

    with pytest.raises(TypeError, match=r"an attempt has no node$"):
        record_start(run, attempt=0, job_id="7", node=("node1",))

    assert Ledger.read(run).newest is None


def test_nothing_that_follows_is_false() -> None:
    assert [bool(following) for following in Next] == [False, True, True, True, True]


def test_each_ending_has_its_exit_code() -> None:
    assert {ending: ending.exit_code for ending in Ending} == {
        "finished": exit_codes.FINISHED,
        "stopped": exit_codes.STOPPED,
        "failed": exit_codes.FAILED,
        "refused": exit_codes.REFUSED,
        "cancelled": exit_codes.FAILED,
        "fenced": exit_codes.FENCED,
    }


def test_a_ledger_answers_for_one_attempt_or_several(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert (Ledger.read(run).newest, Ledger.read(run).newest_number, Ledger.read(run).newest_committed_step) == (
        None,
        -1,
        0,
    )
    for number in (0, 2, 3):
        record_start(run, attempt=number, job_id=f"job {number}", first_step=number * 10)
    record_end(run, 2, End(ending=Ending.FAILED, exit_code=1, last_step=70))
    append_json_line(run.attempts, {"attempt": 5, "ending": "failed"})  # the line of its start is lost

    found = Ledger.read(run)

    assert found.newest == found.attempts[-1] == found.attempt(3)
    assert found.newest_number == 5
    assert found.attempt(5) is None
    queued = QueuedJob(job_id="8", attempt=2, at=0.0, since=2)
    assert [one.attempt for one in attempts_of_submission(found, queued)] == [2, 3]
    assert [one.attempt if one else None for one in map(found.newest_before, (3, 2, 0))] == [2, 0, None]
    assert found.newest_committed_step == 70
