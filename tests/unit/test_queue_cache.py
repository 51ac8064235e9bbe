"""Slurm is asked once for all who look within half a minute, and less and less often while it does not answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ddp_hpc.watch.queue import FIRST_PAUSE_S, FRESH_S, LONGEST_PAUSE_S, UNKNOWN_S, AskSlurm, asker

COMPLETED = "echo 'JobId=12 JobName=x UserId=ada(1) JobState=COMPLETED Reason=None Command=x'"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"


class Fake:
    """Commands of Slurm's that count their calls, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 1000.0
        (folder / "bin").mkdir()
        (folder / "home").mkdir()
        self.set("squeue", "exit 0")
        self.set("scontrol", COMPLETED)
        self.set("sacct", "exit 1")

    def set(self, command: str, body: str) -> None:
        path = self.folder / "bin" / command
        path.write_text(f"#!/bin/sh\necho >> {self.folder}/{command}.calls\n{body}\n")
        path.chmod(0o755)

    def calls(self, command: str) -> int:
        path = self.folder / f"{command}.calls"
        return path.read_text().count("\n") if path.exists() else 0

    @property
    def environ(self) -> Mapping[str, str]:
        return {"PATH": f"{self.folder}/bin:/usr/bin:/bin", "HOME": f"{self.folder}/home"}

    @property
    def ask(self) -> AskSlurm:
        return asker(self.environ, clock=lambda: self.now)


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_a_task_of_an_array_is_found_by_either_of_its_numbers(fake: Fake) -> None:
    fields = ["31", "14", "3", "PENDING", "Priority", "N/A"]
    fake.set("squeue", "printf '%s\\036\\n' '" + "\x1f".join(fields) + "'")

    assert (fake.ask("14_3", 900.0).state, fake.ask("31", 900.0).state) == ("PENDING", "PENDING")
    assert fake.ask("14", 900.0).state != "PENDING"


def test_many_questions_within_half_a_minute_are_one_squeue(fake: Fake) -> None:
    for number in range(5):
        fake.ask(str(number), 900.0)
    fake.now += FRESH_S - 1
    fake.ask("12", 900.0)

    assert fake.calls("squeue") == 1
    fake.now += 2
    fake.ask("12", 900.0)
    assert fake.calls("squeue") == 2


def test_a_job_newer_than_the_answer_is_asked_about_at_once(fake: Fake) -> None:
    fake.ask("12", 900.0)
    fake.now += 1

    fake.ask("13", fake.now - 0.5)

    assert fake.calls("squeue") == 2


def test_a_job_that_has_ended_is_asked_for_by_itself_and_only_once(fake: Fake) -> None:
    words = [fake.ask("12", 900.0) for _ in range(3)]

    assert {word.state for word in words} == {"COMPLETED"}
    assert fake.calls("scontrol") == 1


def test_a_job_that_slurm_has_forgotten_is_asked_for_again_only_after_a_while(fake: Fake) -> None:
    fake.set("scontrol", FORGOTTEN)
    asked_at = fake.now

    words = [fake.ask("12", 900.0)]
    while fake.now < asked_at + UNKNOWN_S - FRESH_S:
        fake.now += FRESH_S
        words.append(fake.ask("12", 900.0))

    assert {(word.state, word.problem) for word in words} == {(None, "")}
    assert (fake.calls("scontrol"), fake.calls("sacct")) == (1, 1)
    fake.set("scontrol", COMPLETED)
    fake.now = asked_at + UNKNOWN_S
    assert fake.ask("12", 900.0).state == "COMPLETED"


def test_while_slurm_does_not_answer_pauses_double_up_to_minutes(fake: Fake) -> None:
    fake.set("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    asked_at, pauses, word = fake.now, list[float](), fake.ask("12", 900.0)
    while len(pauses) < 8:
        before, fake.now = fake.calls("squeue"), fake.now + 1
        word = fake.ask("12", 900.0)
        if fake.calls("squeue") > before:
            pauses.append(fake.now - asked_at)
            asked_at = fake.now

    assert "does not answer" in word.problem
    assert pauses[:4] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert max(pauses) == LONGEST_PAUSE_S


def test_without_a_home_it_works_and_asks_each_time(fake: Fake) -> None:
    ask = asker({"PATH": fake.environ["PATH"], "HOME": "/proc/nowhere"}, clock=lambda: fake.now)

    assert [ask("12", 900.0).state for _ in range(2)] == ["COMPLETED"] * 2
    assert fake.calls("squeue") == 2
