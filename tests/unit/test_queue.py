"""What is told of jobs, and by whom, also while Slurm answers badly; how seldom it is asked is in `test_queue_cache`."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from ddp_hpc.base.processes import host_name
from ddp_hpc.base.slurm_times import parse_time
from ddp_hpc.cluster.slurm import queries
from ddp_hpc.watch.queue import FIRST_PAUSE_S, FRESH_S, AskSlurm, QueueStatus, asker

DOWN = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
ENDED = "echo 'JobId=12 JobName=x UserId=ada(1) JobState=NODE_FAIL Reason=NodeDown Command=x'"


class Fake:
    """Commands of Slurm's that count their calls, a queue, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        for name in ("bin", "home"):
            (folder / name).mkdir()
        self.environ: Mapping[str, str] = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": f"{folder}/home"}
        self.set("squeue", f"cat {folder}/queue")
        self.set("scontrol", FORGOTTEN)
        self.set("sacct", "exit 1")
        self.queue()

    @property
    def cache(self) -> Path:
        return self.folder / "home" / ".cache" / "ddp_hpc" / f"queue-{host_name()}.json"

    def set(self, command: str, body: str) -> None:
        path = self.folder / "bin" / command
        path.write_text(f"#!/bin/sh\necho >> {self.folder}/{command}.calls\n{body}\n")
        path.chmod(0o755)

    def queue(self, *jobs: Mapping[str, str]) -> None:
        """Put jobs into the queue."""
        rows = [
            queries._FIELD.join(job.get(name, "N/A") for name in queries._QUEUE_FIELDS) + queries._RECORD
            for job in jobs
        ]
        (self.folder / "queue").write_text("\n".join(rows))

    def calls(self, command: str) -> int:
        path = self.folder / f"{command}.calls"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def ask(self) -> AskSlurm:
        return asker(self.environ, clock=lambda: self.now)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


WAITING = {"JobID": "12", "State": "PENDING", "Reason": "Priority", "StartTime": "2030-01-01T00:00:00"}
RUNNING = {"JobID": "13", "State": "RUNNING", "Reason": "None", "NodeList": "node1"}


def test_a_job_in_the_queue_is_told_as_squeue_lists_it(fake: Fake) -> None:
    fake.queue(WAITING, RUNNING)

    waiting, running = fake.ask("12", 900.0), fake.ask("13", 900.0)

    starts_at = parse_time(WAITING["StartTime"])
    assert waiting == QueueStatus(job_id="12", state="PENDING", reason="Priority", starts_at=starts_at, at=1000.0)
    assert (waiting.is_waiting, waiting.has_ended) == (True, False)
    assert (running.state, running.reason, running.source) == ("RUNNING", "", "squeue")
    assert (running.is_waiting, running.has_ended) == (False, False)
    assert (fake.calls("squeue"), fake.calls("scontrol")) == (1, 0)


@pytest.mark.parametrize(
    ("state", "is_waiting", "has_ended"),
    [
        (None, False, False),
        ("PENDING", True, False),
        ("REQUEUED", True, False),
        ("REQUEUE_HOLD", True, False),
        ("COMPLETING", False, False),
        ("CANCELLED by 1000", False, True),
        ("NODE_FAIL", False, True),
        ("A_WORD_OF_TOMORROW", False, False),
    ],
)
def test_a_word_tells_whether_the_job_waits_or_has_ended(state: str | None, is_waiting: bool, has_ended: bool) -> None:
    word = QueueStatus(job_id="12", state=state)

    assert (word.is_waiting, word.has_ended) == (is_waiting, has_ended)


def test_the_last_answer_is_kept_while_slurm_is_down_and_the_problem_is_told(fake: Fake) -> None:
    fake.queue(WAITING)
    fake.ask("12", 900.0)
    fake.set("squeue", DOWN)
    fake.now += FRESH_S

    word = fake.ask("12", 900.0)

    assert (word.state, word.at) == ("PENDING", 1000.0)
    assert "Slurm does not answer: `squeue` prints" in word.problem
    assert fake.calls("scontrol") == 0


def test_when_slurm_is_back_nothing_of_the_problem_is_left(fake: Fake) -> None:
    fake.set("squeue", DOWN)
    assert fake.ask("12", 900.0).problem
    fake.set("squeue", f"cat {fake.folder}/queue")
    fake.queue(WAITING)
    fake.now += FIRST_PAUSE_S

    word = fake.ask("12", 900.0)

    assert (word.state, word.problem, word.at) == ("PENDING", "", fake.now)
    fake.now += FRESH_S
    fake.set("squeue", DOWN)
    fake.ask("12", 900.0)
    assert json.loads(fake.cache.read_text())["pause_s"] == FIRST_PAUSE_S


def test_a_new_job_does_not_cut_a_pause_short(fake: Fake) -> None:
    fake.set("squeue", DOWN)
    fake.ask("12", 900.0)
    fake.now += 1

    word = fake.ask("13", fake.now)

    assert (word.state, word.at) == (None, 0.0)
    assert "does not answer" in word.problem
    assert fake.calls("squeue") == 1


@pytest.mark.parametrize("missing", ["squeue", "scontrol"])
def test_a_command_that_is_not_here_is_a_problem_and_no_error(missing: str, fake: Fake) -> None:
    (fake.folder / "bin" / missing).unlink()
    ask = asker({**fake.environ, "PATH": f"{fake.folder}/bin"}, clock=lambda: fake.now)
    fake.set("squeue" if missing == "scontrol" else "scontrol", ":")

    assert f"`{missing}`, but PATH on this host has none" in ask("12", 900.0).problem


def test_a_job_that_has_ended_is_told_by_the_controller_once_for_all(fake: Fake) -> None:
    fake.set("scontrol", ENDED)

    first = fake.ask("12", 900.0)
    fake.now += 10 * FRESH_S
    again = fake.ask("12", 900.0)

    assert again == first == QueueStatus(
        job_id="12", state="NODE_FAIL", reason="NodeDown", at=1000.0, source="scontrol or sacct"
    )  # fmt: skip
    assert fake.calls("scontrol") == 1


def test_a_job_that_the_controller_forgot_is_told_by_the_database_once(fake: Fake) -> None:
    row = queries._FIELD.join(["12", "COMPLETED", "x", "x", "x", "node1", "None"])
    fake.set("sacct", f"printf '%s\\n' '{row}'")

    words = [fake.ask("12", 900.0) for _ in range(3)]

    assert [word.state for word in words] == ["COMPLETED"] * 3
    assert (fake.calls("scontrol"), fake.calls("sacct")) == (1, 1)


def test_how_a_job_ended_is_still_told_while_slurm_is_down(fake: Fake) -> None:
    fake.set("scontrol", ENDED)
    fake.ask("12", 900.0)
    fake.set("squeue", DOWN)
    fake.now += FRESH_S

    word = fake.ask("12", 900.0)

    assert (word.state, word.at) == ("NODE_FAIL", 1000.0)
    assert "does not answer" in word.problem


def test_a_job_that_is_started_again_after_its_end_is_told_by_the_queue(fake: Fake) -> None:
    fake.set("scontrol", ENDED)
    fake.ask("12", 900.0)
    fake.queue(WAITING)
    fake.now += FRESH_S

    assert fake.ask("12", 900.0).state == "PENDING"


def test_a_job_that_nobody_knows_has_no_state_and_no_problem(fake: Fake) -> None:
    word = fake.ask("12", 900.0)

    assert (word.state, word.problem, word.at) == (None, "", 1000.0)


def test_a_controller_that_fails_is_a_problem_and_nothing_is_remembered_of_it(fake: Fake) -> None:
    fake.set("scontrol", DOWN)
    assert "does not answer" in fake.ask("12", 900.0).problem

    fake.set("scontrol", ENDED)

    assert fake.ask("12", 900.0).state == "NODE_FAIL"


def test_who_looks_at_the_same_time_shares_the_answer(fake: Fake) -> None:
    fake.queue(WAITING)
    fake.set("squeue", f"sleep 0.2; cat {fake.folder}/queue")
    words = list[QueueStatus]()
    lookers = [threading.Thread(target=lambda: words.append(fake.ask("12", 900.0))) for _ in range(8)]

    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join()

    assert [word.state for word in words] == ["PENDING"] * 8
    assert fake.calls("squeue") == 1


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"at": 1, "jobs": 3}', '{"at": 1, "jobs": {"12": {"colour": "blue"}}, "ended": {}}'],
    ids=["empty", "torn", "a list", "no keys", "no jobs", "of another version"],
)
def test_a_cache_that_cannot_be_read_is_made_anew(text: str, fake: Fake) -> None:
    fake.queue(WAITING)
    fake.cache.parent.mkdir(parents=True)
    fake.cache.write_text(text)

    assert [fake.ask("12", 900.0).state for _ in range(2)] == ["PENDING"] * 2
    assert fake.calls("squeue") == 1


@pytest.mark.parametrize("home", ["missing", "a file", "no place for the cache"])
def test_without_a_place_for_the_cache_it_works(home: str, fake: Fake) -> None:
    fake.queue(WAITING)
    place = {"missing": "/proc/nowhere", "a file": "/dev/null"}.get(home, f"{fake.folder}/home")
    if home == "no place for the cache":
        fake.cache.mkdir(parents=True)
    ask = asker({**fake.environ, "HOME": place}, clock=lambda: fake.now)

    assert [ask("12", 900.0).state for _ in range(2)] == ["PENDING"] * 2
    assert fake.calls("squeue") == 2


def test_a_job_without_any_home_in_its_environment_is_told_too(fake: Fake) -> None:
    fake.queue(WAITING)
    environ = {"PATH": fake.environ["PATH"], "XDG_CACHE_HOME": "/dev/null/nowhere"}

    assert asker(environ, clock=lambda: fake.now)("12", 900.0).state == "PENDING"


def test_the_cache_lies_where_the_user_wants_caches(fake: Fake) -> None:
    fake.queue(WAITING)
    environ = {**fake.environ, "XDG_CACHE_HOME": f"{fake.folder}/caches"}

    asker(environ, clock=lambda: fake.now)("12", 900.0)

    assert (fake.folder / "caches" / "ddp_hpc" / f"queue-{host_name()}.json").exists()
    assert not fake.cache.exists()
