"""Where a run stands, told from what its directory shows."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.base import processes
from ddp_hpc.run.run_dir.ledger import Attempt, Ending, Next, record_addition
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import Progress
from ddp_hpc.watch.status import SILENCE_S, Observation, State, read_status, status_of
from tests.made_run import add_attempt, add_checkpoint, add_progress, changed, made_attempt, make_run, progress

RUN = RunDir(Path("runs/digits"))
NOW = 1010.0


def attempt(number: int = 0, ending: Ending | None = None, *, host: str = "here", started_at: float = 800.0) -> Attempt:
    """Return an entry of the ledger."""
    ended_at = None if ending is None else started_at + 50
    return made_attempt(
        number,
        host=host,
        started_at=started_at,
        ending=ending,
        ended_at=ended_at,
        reason="why",
    )


def seen(
    attempts: Sequence[Attempt],
    *,
    is_held: bool | None,
    newest: Progress | None = None,
    wants_stop: bool = False,
    is_done: bool = False,
) -> Observation:
    """Return an observation made at NOW on the host `here`."""
    return Observation(
        attempts=attempts,
        progress=newest,
        committed=[10, 20],
        is_held=is_held,
        wants_stop=wants_stop,
        is_done=is_done,
        host="here",
        now=NOW,
    )


ELSEWHERE = attempt(host="there")
STATES: list[tuple[str, Observation, State]] = [
    ("begun, no step yet", seen([attempt()], is_held=True), "starting"),
    (
        "begun again, no step yet",
        seen([attempt(0, Ending.STOPPED), attempt(1)], is_held=True, newest=progress(0)),
        "starting",
    ),
    ("stepping", seen([attempt()], is_held=True, newest=progress()), "running"),
    ("asked to stop", seen([attempt()], is_held=True, newest=progress(), wants_stop=True), "stopping"),
    ("held, before the ledger's first line", seen([], is_held=True), "starting"),
    ("nobody there, no last word", seen([attempt()], is_held=False, newest=progress()), "interrupted"),
    ("never begun", seen([], is_held=False), "interrupted"),
    ("killed after the last step was committed", seen([attempt()], is_held=False, is_done=True), "finished"),
    ("finished", seen([attempt(0, Ending.FINISHED)], is_held=False, is_done=True), "finished"),
    ("stopped", seen([attempt(0, Ending.STOPPED)], is_held=False, wants_stop=True), "stopped"),
    ("failed", seen([attempt(0, Ending.FAILED)], is_held=False), "failed"),
    ("failed, and its last process is leaving", seen([attempt(0, Ending.FAILED)], is_held=True), "failed"),
    ("refused", seen([attempt(0, Ending.REFUSED)], is_held=False), "refused"),
    ("cancelled", seen([attempt(0, Ending.STOPPED), attempt(1, Ending.CANCELLED)], is_held=False), "cancelled"),
    ("on another host, heard of lately", seen([ELSEWHERE], is_held=False, newest=progress(at=NOW - 5)), "running"),
    ("on another host, silent", seen([ELSEWHERE], is_held=False, newest=progress(at=NOW - SILENCE_S - 1)), "unknown"),
    ("on another host, just begun", seen([replace(ELSEWHERE, started_at=NOW - 5)], is_held=False), "starting"),
    ("on a disk without locks, heard of lately", seen([attempt()], is_held=None, newest=progress()), "running"),
    ("on a disk without locks, silent", seen([attempt(started_at=1.0)], is_held=None), "unknown"),
]


@pytest.mark.parametrize(("observation", "state"), [row[1:] for row in STATES], ids=[row[0] for row in STATES])
def test_a_run_is_in_the_state_that_its_directory_shows(observation: Observation, state: State) -> None:
    assert status_of(RUN, observation).state == state


def test_the_numbers_are_those_of_the_newest_progress() -> None:
    status = status_of(RUN, seen([attempt(3)], is_held=True, newest=progress(3, 20, metrics={"accuracy": 0.9})))

    assert (status.run, status.path, status.attempt, status.job_id, status.host) == (
        "digits",
        "runs/digits",
        3,
        "7",
        "here",
    )
    assert (status.step, status.total_steps, status.epoch, status.epochs) == (20, 100, 3, 10)
    assert (status.loss, status.samples_per_s, status.eta_s, status.metrics) == (0.5, 640.0, 2.0, {"accuracy": 0.9})
    assert (status.source, status.age_s) == ("run directory", 10.0)


def test_the_last_checkpoint_is_what_lies_on_the_disk() -> None:
    """After a crash progress.json may be older than the newest commit."""
    status = status_of(RUN, seen([attempt()], is_held=False, newest=progress(last_checkpoint=10)))

    assert status.last_checkpoint == 20
    assert "Submit the run again: it continues from step 20" in status.reason


def test_a_run_that_has_ended_has_no_time_left() -> None:
    assert status_of(RUN, seen([attempt(0, Ending.STOPPED)], is_held=False, newest=progress())).eta_s is None


def test_a_status_without_any_record_has_no_age() -> None:
    status = status_of(RUN, seen([], is_held=False))

    assert (status.age_s, status.attempt, status.step) == (None, None, 0)


def test_a_run_is_alive_as_long_as_a_process_holds_its_lock(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run)
    add_progress(run)
    fd = processes.take_lock(run.lock)
    assert fd is not None

    held = read_status(run, now=time.time())
    os.close(fd)
    free = read_status(run, now=time.time())

    assert (held.state, free.state) == ("running", "interrupted")
    assert held.host == socket.gethostname()


def test_looking_does_not_change_the_directory(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="stopped")
    before = {path: path.stat().st_mtime_ns for path in [run.path, *run.path.rglob("*")]}

    read_status(run, now=time.time())

    assert {path: path.stat().st_mtime_ns for path in [run.path, *run.path.rglob("*")]} == before


def test_committed_checkpoints_are_seen_and_half_made_ones_not(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_checkpoint(run, 20)
    (run.checkpoints / "attempt-1.writing" / "step-00000040").mkdir(parents=True)
    (run.checkpoints / "step-00000060").mkdir()

    assert read_status(run, now=time.time()).last_checkpoint == 20


@pytest.mark.parametrize("text", ["", "{", '{"attempt": 0}', "[]"])
def test_a_progress_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_attempt(run, ending="failed")
    run.progress.write_text(text)

    assert read_status(run, now=time.time()).total_steps is None


@pytest.mark.parametrize(("is_held", "state"), [(True, "starting"), (False, "interrupted")])
def test_an_attempt_that_another_is_to_follow_in_place_has_none_where_nobody_lives(is_held: bool, state: str) -> None:
    between = changed(attempt(0, Ending.FAILED), next=Next.IN_PLACE)

    assert status_of(RUN, seen([between], is_held=is_held)).state == state


def test_a_failure_that_a_restart_mended_is_named_but_none_that_the_user_mended() -> None:
    failed = changed(attempt(0, Ending.FAILED), reason="rank 1 was killed\nlog", next=Next.IN_PLACE)
    again = replace(failed, attempt=1)
    submitted = changed(failed, next=Next.NOTHING)

    def mended(*attempts: Attempt) -> str:
        return status_of(RUN, seen(attempts, is_held=False, is_done=True)).mended

    assert (
        mended(failed, attempt(1, Ending.FINISHED))
        == "attempt 0 failed, and ddp-hpc started the next one: rank 1 was killed"
    )
    assert mended(failed, again, attempt(2)).endswith("rank 1 was killed; failures before it: 1")
    assert mended(submitted, attempt(1, Ending.FINISHED)) == ""
    assert mended(failed) == ""


def test_a_refusal_on_this_machine_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    run, refused, on_slurm = (make_run(tmp_path, name) for name in ("run", "refused", "on-slurm"))
    for one in (run, on_slurm):
        add_attempt(one, 0, ending=Ending.FINISHED)
        add_attempt(one, 1, ending=Ending.REFUSED)
    record_addition(on_slurm, attempt=1, cluster="slurm")
    add_attempt(refused, ending=Ending.REFUSED)

    states = [read_status(one, now=1000.0).state for one in (run, refused, on_slurm)]

    assert states == ["finished", "refused", "refused"]
