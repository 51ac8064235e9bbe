"""The records of a run that is a job of Slurm: the job in the queue, the verdict of rank zero's node."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_hpc.base.durable import append_json_line
from ddp_hpc.run.run_dir.ledger import Cause, End, Ending, Ledger, Next, record_end, record_start
from ddp_hpc.run.run_dir.records import (
    QueuedJob,
    ask_to_stop,
    read_queued_job,
    read_stop_request,
    take_rank_zero_exit,
    write_queued_job,
    write_rank_zero_exit,
)
from tests.made_run import make_run

JOB = QueuedJob(job_id="17", attempt=2, at=1000.5)


@pytest.mark.parametrize("job", [JOB, replace(JOB, cancelled_at=1001.0), replace(JOB, job_id="17_3")])
def test_a_queued_job_is_read_as_it_was_written(job: QueuedJob, tmp_path: Path) -> None:
    run = make_run(tmp_path)

    write_queued_job(run, job)

    assert read_queued_job(run) == job


def test_the_newest_job_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_queued_job(run, replace(JOB, cancelled_at=1001.0))

    write_queued_job(run, JOB)

    assert read_queued_job(run) == JOB
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "submission.json"]


@pytest.mark.parametrize(
    "text",
    [None, "", '{"job_id": "17", "att', "[]", "17", '{"job_id": "17"}', "\x00\x00\x00"],
    ids=["missing", "empty", "torn", "no object", "a number", "of another version", "a hole"],
)
def test_a_queued_job_that_cannot_be_read_is_none(text: str | None, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    if text is not None:
        run.submission.write_text(text)

    assert read_queued_job(run) is None


def test_what_a_later_version_adds_to_a_queued_job_is_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.submission.write_text('{"job_id": "17", "attempt": 2, "at": 1000.5, "cluster": "north"}')

    assert read_queued_job(run) == JOB


@pytest.mark.parametrize("exit_code", [0, 1, 2, 98, 99])
def test_a_verdict_is_taken_once(exit_code: int, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_rank_zero_exit(run, 3, exit_code)

    assert take_rank_zero_exit(run, 3) == exit_code
    assert take_rank_zero_exit(run, 3) is None


def test_a_verdict_is_of_its_attempt_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_rank_zero_exit(run, 3, 99)

    assert take_rank_zero_exit(run, 4) is None
    assert take_rank_zero_exit(run, 3) == 99


def test_a_second_verdict_wins(tmp_path: Path) -> None:
    """Rank zero's processes are started again in the same attempt when a port was taken."""
    run = make_run(tmp_path)
    write_rank_zero_exit(run, 0, 98)
    write_rank_zero_exit(run, 0, 0)

    assert take_rank_zero_exit(run, 0) == 0


@pytest.mark.parametrize("text", ["", '{"exit_c', "99"], ids=["empty", "torn", "no object"])
def test_a_verdict_that_cannot_be_read_is_none_and_goes(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.rank_zero_exit(0).parent.mkdir(parents=True)
    run.rank_zero_exit(0).write_text(text)

    assert take_rank_zero_exit(run, 0) is None
    assert not run.rank_zero_exit(0).exists()


def test_an_attempt_on_slurm_knows_its_nodes_and_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="17", cluster="slurm", nodes=["node3", "node1"], ends_at=4600.0)
    record_start(run, attempt=1, job_id="17", cluster="slurm", nodes=["node2"])

    first, second = Ledger.read(run).attempts

    assert (first.cluster, first.nodes, first.ends_at) == ("slurm", ("node3", "node1"), 4600.0)
    assert (second.cluster, second.nodes, second.ends_at) == ("slurm", ("node2",), None)


def test_an_attempt_on_this_machine_has_neither(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="17")

    (attempt,) = Ledger.read(run).attempts

    assert (attempt.cluster, attempt.nodes, attempt.ends_at, attempt.host) == ("local", (), None, socket.gethostname())


def test_the_users_cancel_is_the_last_word_whatever_the_processes_say_later(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="17", cluster="slurm", nodes=["node1"])
    record_end(run, 0, End(ending=Ending.CANCELLED, exit_code=-9, reason="cancelled by the user"))
    record_end(run, 0, End(ending=Ending.FAILED, exit_code=1, reason="srun: error"))
    record_start(run, attempt=1, job_id="18", cluster="slurm", nodes=["node1"])

    first, second = Ledger.read(run).attempts

    assert (first.ending, first.exit_code, first.reason) == ("cancelled", -9, "cancelled by the user")
    assert second.end is None


# --- what decides about the next attempt -----------------------------------------------------------------------------


def test_how_an_attempt_ended_and_what_follows_are_read_as_written(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=3, job_id="17", cluster="slurm", nodes=["node1", "node2"], restart=2, first_step=40)
    end = End(
        ending=Ending.FAILED,
        exit_code=1,
        reason="lost node2",
        cause=Cause.NODE_FAILED,
        last_step=60,
        next=Next.REQUEUE,
        failed_nodes=("node2",),
    )
    record_end(run, 3, end)

    (attempt,) = Ledger.read(run).attempts

    assert (attempt.restart, attempt.first_step, attempt.last_step) == (2, 40, 60)
    assert (attempt.cause, attempt.next, attempt.failed_nodes) == ("node failed", "requeue", ("node2",))


def test_a_ledger_of_before_there_were_causes_is_still_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    start = {"attempt": 0, "job_id": "17", "host": "node1", "pid": 7, "started_at": 1.0}
    append_json_line(run.attempts, {**start, "cluster": "slurm", "nodes": ["node1"], "ends_at": 9.0})
    append_json_line(run.attempts, {"attempt": 0, "ending": "failed", "exit_code": 1, "reason": "x", "ended_at": 2.0})

    (attempt,) = Ledger.read(run).attempts

    assert (attempt.nodes, attempt.ends_at, attempt.ending) == (("node1",), 9.0, "failed")
    assert (attempt.cause, attempt.next, attempt.first_step, attempt.last_step) == (None, "", 0, None)
    assert (attempt.restart, attempt.failed_nodes) == (0, ())


def test_an_end_corrected_later_wins_over_the_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    record_start(run, attempt=0, job_id="17")
    record_end(run, 0, End(ending=Ending.STOPPED, exit_code=99, cause=Cause.PREEMPTED, last_step=8, next=Next.REQUEUE))
    record_end(run, 0, End(ending=Ending.CANCELLED, exit_code=99, cause=Cause.CANCELLED))

    (attempt,) = Ledger.read(run).attempts

    assert (attempt.ending, attempt.cause, attempt.next) == ("cancelled", "cancelled", "")


# --- being asked to stop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["end", "requeue"])
def test_what_is_to_follow_a_stop_is_read_as_it_was_asked(then: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path)

    before = read_stop_request(run)
    ask_to_stop(run, then=then)

    assert before is None
    assert read_stop_request(run) == then


@pytest.mark.parametrize("then", ["end", "requeue"])
def test_the_supervisors_own_word_to_its_workers_is_no_request_of_the_users(then: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path)

    ask_to_stop(run, then=then, by="supervisor")

    assert run.stop_request.exists()
    assert read_stop_request(run) is None


@pytest.mark.parametrize(
    ("text", "then"),
    [("", "end"), ("\n", "end"), ("please\n", "end"), ("{}", "end"), ('{"then": "requeue"}', "requeue")],
    ids=["touched", "an empty line", "a word", "nothing said", "by hand"],
)
def test_a_stop_file_made_by_hand_asks_too(text: str, then: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.stop_request.write_text(text)

    assert read_stop_request(run) == then


@pytest.mark.parametrize("text", ["{", '{"by": "user", "th', "{stop}"])
def test_a_stop_file_that_cannot_be_understood_asks_to_stop(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.stop_request.write_text(text)

    assert read_stop_request(run) == "end"
