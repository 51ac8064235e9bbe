"""The contract of a back end: the same tests against each; a subclass says which."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from ddp_hpc.launch.submission.backend import backend_of
from ddp_hpc.run.checkpoints.checkpoint_names import committed_steps
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.records import read_progress
from tests.distributed import trial_recipe

CONFIG = """\
recipe: {target: 'trial_recipe:build', args: {num_samples: 80, load_s: 0.02}}
train: {global_batch_size: 8, epochs: 1000, max_steps: 200}
checkpoint: {every_steps: 100000}
eval: {every_epochs: 1000}
log: {every_steps: 1}
"""
FAST = "recipe.args.load_s=0"
"""Another 200 steps then take a moment, where 32 s are enough for a stop to come amid them."""
PATIENCE_S = 240.0

Answer = Mapping[str, Any]


class Bench(Protocol):
    """Where one back end is tried."""

    backend: str
    folder: Path
    refused: str
    """A setting that this back end refuses."""

    may_commit_when_cancelled: bool
    """Whether its processes get a signal, and time, before they are killed."""

    def call(self, function: str, name: str, *words: str) -> Answer:
        """Call a function of the back end for the run of that name (`driver.perform`)."""


def furnished(folder: Path) -> Path:
    """Put the configuration and its recipe into a folder; return it."""
    (folder / "trial.yaml").write_text(CONFIG)
    shutil.copy(str(trial_recipe.__file__), folder)
    return folder


def run_of(bench: Bench, name: str) -> RunDir:
    return RunDir(bench.folder / "runs" / name)


def await_step(run: RunDir, attempt: int) -> None:
    """Return once the attempt has taken a step."""
    deadline = time.monotonic() + PATIENCE_S
    while (progress := read_progress(run)) is None or progress.attempt < attempt or not progress.step:
        assert time.monotonic() < deadline, f"no step in {PATIENCE_S} s: {list(Ledger.read(run).attempts)}"
        time.sleep(0.2)


@dataclass
class Life:
    """What one run's life came to: two submit it at once, it is stopped, submitted again, and finishes."""

    at_once: list[Answer] = field(default_factory=list)
    again: Answer = field(default_factory=dict)
    deleted: Answer = field(default_factory=dict)
    stopped: Answer = field(default_factory=dict)
    went_on: Answer = field(default_factory=dict)
    finished: Answer = field(default_factory=dict)
    after: Answer = field(default_factory=dict)


class BackendContract:
    """What every back end does alike."""

    @pytest.fixture(scope="class")
    @classmethod
    def life(cls, bench: Bench) -> Life:
        """Live through one run."""
        run, life = run_of(bench, "life"), Life()
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(bench.call, "submit", "life") for _ in range(2)]
            life.at_once = [one.result() for one in both]
        await_step(run, 0)
        life.again, life.deleted = bench.call("submit", "life"), bench.call("delete", "life")
        assert "value" in bench.call("stop", "life")
        life.stopped = bench.call("wait", "life", "0")
        life.went_on = bench.call("submit", "life", FAST)
        life.finished = bench.call("wait", "life", str(life.went_on["value"]["attempt"]))
        life.after = bench.call("submit", "life", FAST)
        return life

    def test_a_description_makes_nothing(self, bench: Bench) -> None:
        described = bench.call("describe", "dry")["value"]

        assert described["command"]
        assert not run_of(bench, "dry").path.exists()

    @pytest.mark.parametrize("function", ["prepare", "submit"])
    def test_a_refused_run_leaves_nothing_behind(self, bench: Bench, function: str) -> None:
        told = bench.call(function, "refused", bench.refused)

        assert (told["error"], told["exit_code"]) == ("ConfigError", 2), told
        assert bench.refused.partition("=")[0] in told["message"]
        assert not [path for path in (bench.folder / "runs").glob("*") if "refused" in path.name]

    @pytest.mark.parametrize("function", ["stop", "cancel"])
    def test_what_was_never_started_cannot_be_ended_and_the_error_says_what_to_do(
        self, bench: Bench, function: str
    ) -> None:
        assert "error" not in bench.call("prepare", "prepared")

        told = bench.call(function, "prepared")

        assert (told["error"], told["exit_code"]) == ("ConfigError", 2), told
        assert "`ddp-hpc " in told["message"]
        assert Ledger.read(run_of(bench, "prepared")).attempts == ()
        assert bench.call("find_job", "prepared") == {"value": None}

    @pytest.mark.long
    def test_two_submissions_at_once_make_one_run(self, bench: Bench, life: Life) -> None:
        begun = [one for one in life.at_once if one.get("value", {}).get("state") in {"started", "queued"}]
        others = [one for one in life.at_once if one not in begun]

        assert len(begun) == 1, life.at_once
        assert all(
            one.get("exit_code") in {1, 2} or one["value"]["state"] in {"running", "waiting"} for one in others
        ), others
        assert [attempt.attempt for attempt in Ledger.read(run_of(bench, "life")).attempts] == [0, 1]

    def test_a_run_that_is_there_is_not_started_again_and_may_not_be_deleted(self, bench: Bench, life: Life) -> None:
        there = life.again["value"]

        assert (there["state"], there["attempt"], there["backend"]) == ("running", 0, bench.backend)
        assert life.deleted["error"] == "RunBusyError", life.deleted

    def test_a_stopped_run_has_committed_and_another_submission_goes_on_from_there(
        self, bench: Bench, life: Life
    ) -> None:
        stopped, went_on = life.stopped["value"], life.went_on["value"]
        second = Ledger.read(run_of(bench, "life")).attempts[1]

        assert (stopped["attempt"], stopped["ending"]) == (0, "stopped")
        assert 0 < stopped["last_step"] < 200
        assert (went_on["attempt"], went_on["is_new"]) == (1, False)
        assert second.first_step == stopped["last_step"]

    def test_who_waits_gets_the_last_attempt_and_a_finished_run_is_not_started_again(
        self, bench: Bench, life: Life
    ) -> None:
        finished, after = life.finished["value"], life.after["value"]

        assert (finished["attempt"], finished["ending"], finished["next"]) == (1, "finished", "")
        assert (after["state"], after["attempt"]) == ("finished", 1)

    def test_a_runs_own_records_say_which_back_end_holds_it(self, bench: Bench, life: Life) -> None:
        assert bench.backend == backend_of(run_of(bench, "life")).NAME

    def test_a_cancelled_run_ends_at_once_and_waits_for_no_commit(self, bench: Bench) -> None:
        run = run_of(bench, "gone")
        began = bench.call("submit", "gone")["value"]
        await_step(run, 0)

        assert "value" in bench.call("cancel", "gone")

        (attempt,) = Ledger.read(run).attempts
        assert (began["is_new"], attempt.ending) == (True, "cancelled")
        assert bench.may_commit_when_cancelled or committed_steps(run) == []
        assert _ended(bench, "gone")
        assert _error_of_cancel(bench, "gone") == "ConfigError"


def _error_of_cancel(bench: Bench, name: str) -> str:
    """Return the error of a cancel once nothing is left to cancel: a job that is ending may be cancelled again."""
    deadline = time.monotonic() + PATIENCE_S
    while "error" not in (answer := bench.call("cancel", name)):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return str(answer["error"])


def _ended(bench: Bench, name: str) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while bench.call("find_job", name)["value"] is not None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return True
