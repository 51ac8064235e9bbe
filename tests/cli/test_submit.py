"""Submitting: what is refused, what a dry run prints, and a run's life as a user sees it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hpc.cli import main
from ddp_hpc.launch.api import load as ddp_hpc_load
from ddp_hpc.launch.api import submit as ddp_hpc_submit
from ddp_hpc.run.config.resolve import load_resolved
from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from ddp_hpc.run.run_dir.software_versions import read_environment, write_environment
from ddp_hpc.watch.status import read_status

RECIPE = """
import time
import torch
from torch.utils.data import TensorDataset
from ddp_hpc.train.recipe import Recipe


class Model(torch.nn.Linear):
    def __init__(self, fails, pause_s):
        super().__init__(4, 2)
        self.fails, self.pause_s = fails, pause_s

    def forward(self, inputs):
        if self.fails:
            raise ValueError("out of luck")
        time.sleep(self.pause_s)
        return super().forward(inputs)


def build(fails=False, pause_s=0.0):
    data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    return Recipe(model=Model(fails, pause_s), train_data=data, loss=torch.nn.functional.cross_entropy)
"""
CONFIG = "recipe: {target: 'tiny:build'}\ntrain: {global_batch_size: 8, epochs: 1}\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current directory, with a configuration and its recipe in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "tiny.py").write_text(RECIPE)
    return tmp_path


def submit(*words: str) -> subprocess.CompletedProcess[str]:
    """Submit as a user does, in a process of its own."""
    return ddp_hpc("submit", *words)


def ddp_hpc(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command here."""
    return subprocess.run([sys.executable, "-m", "ddp_hpc", *words], capture_output=True, text=True, check=False)


@pytest.fixture
def cancelled_later(here: Path) -> Iterator[RunDir]:
    """Return the run of that configuration; end it when the test is over, however it ends."""
    run = RunDir(here / "runs/run")
    yield run
    if run.config.exists() and read_status(run, now=time.time()).is_alive:
        ddp_hpc("cancel", str(run.path))


def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Wait for something another process brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.yaml"], "'nowhere.yaml' does not exist. Correct the path; the directory '.' has run.yaml."),
        (["run.yaml", "train.lrr=1"], "Did you mean `train.lr`?"),
        (["run.yaml", "--trian.lr=1"], "Did you mean `train.lr`?"),
        (["run.yaml", "lr"], "'lr' is not a setting. Write KEY=VALUE"),
        (["train.lr=1"], "but the configuration file is missing"),
        (
            ["run.yaml", "train.global_batch_size=7", "resources.workers_per_node=2"],
            "need a multiple of 2. Set `train.global_batch_size` to 6 or 8",
        ),
        (["run.yaml", "train.sync_batch_norm=true", "resources.workers_per_node=2"], "on GPUs only"),
        (["run.yaml", "runs_dir=/proc/nowhere"], "cannot be written"),
        (["run.yaml", "recipe.target=no_such_module:build"], "no_such_module"),
        (["run.yaml", "recipe.args.nope=1"], "nope"),
    ],
)
def test_what_cannot_be_is_one_error_exit_2_and_leaves_nothing(words: list[str], told: str, here: Path) -> None:
    done = submit(*words)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(here.glob("runs/*"))


@pytest.mark.parametrize(
    "words",
    [
        ["run.yaml", "train.lr=0.5", "seed=3", "--dry-run"],
        ["--dry-run", "run.yaml", "--train.lr=0.5", "--seed=3"],
        ["train.lr=0.5", "run.yaml", "--dry-run", "--seed=3"],
        ["run.yaml", "--dry-run", "--cluster", "local", "--train.lr=0.5", "seed=3"],
    ],
)
def test_settings_may_stand_in_any_order_with_or_without_dashes(
    words: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *words]) == 0

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lr:", "0.5", "#", "command", "line"] in lines
    assert ["seed:", "3", "#", "command", "line"] in lines


def test_a_dry_run_prints_a_configuration_and_a_command_and_makes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "run.yaml", "--dry-run", "--runs-dir", "elsewhere"]) == 0

    out = capsys.readouterr().out
    *_, last = out.splitlines()
    assert last.startswith("# would run: ")
    assert last.endswith(f"{here}/elsewhere/run")
    assert sorted(path.name for path in here.iterdir()) == ["run.yaml", "tiny.py"]
    (here / "again.yaml").write_text(out)
    assert load_resolved(here / "again.yaml").runs_dir == "elsewhere"


def test_a_dry_run_as_json_has_values_sources_and_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "run.yaml", "--dry-run", "--json"]) == 0

    planned = json.loads(capsys.readouterr().out)
    assert planned["config"]["train.epochs"] == {"value": 1, "source": "file run.yaml"}
    assert planned["command"][1:] == ["-m", "ddp_hpc.job.guardian", str(here / "runs/run")]


@pytest.mark.parametrize("word", ["mine", "elsewhere/mine", "elsewhere/mine/config.yaml"])
def test_a_run_that_is_named_has_its_own_configuration(
    word: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "elsewhere" / "mine").mkdir(parents=True)
    kept = f"name: mine\nruns_dir: {here}/elsewhere\nseed: 7\n"
    (here / "elsewhere" / "mine" / "config.yaml").write_text(CONFIG + kept)

    assert main(["submit", word, "train.lr=0.5", "--dry-run", "--json", "--runs-dir", "elsewhere"]) == 0

    planned = json.loads(capsys.readouterr().out)
    values = {key: planned["config"][key]["value"] for key in ("seed", "train.lr", "name")}
    assert values == {"seed": 7, "train.lr": 0.5, "name": "mine"}
    assert planned["command"][-1] == str(here / "elsewhere/mine")


def test_a_run_is_followed_to_its_end_and_finishes_once(here: Path) -> None:
    first = submit("run.yaml", "--follow")
    second = submit("run.yaml", "--wait")

    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.splitlines()[0] == "run: started"
    assert "run finished: step 8 of 8" in first.stdout
    assert f"run   {here}/runs/run" in first.stdout
    assert "ddp-hpc checkpoints run --digest" in first.stdout
    assert (second.returncode, second.stderr) == (0, "")
    assert "has finished already" in second.stdout


@pytest.mark.usefixtures("here")
def test_a_failure_names_the_first_rank_its_error_and_its_log() -> None:
    done = submit("run.yaml", "--wait", "resources.workers_per_node=2", "recipe.args.fails=true")

    assert done.returncode == 1
    assert "failed first, at step 0: ValueError: out of luck" in done.stderr
    assert "logs/attempt-0/rank-" in done.stderr
    assert "again ddp-hpc submit run.yaml resources.workers_per_node=2 recipe.args.fails=true" in done.stdout


@pytest.mark.long
def test_a_run_outlives_its_follower_stops_when_told_and_goes_on_when_submitted_again(cancelled_later: RunDir) -> None:
    run = cancelled_later
    words = ["run.yaml", "recipe.args.pause_s=0.05", "train.epochs=1000"]
    heeding = ["env", "--default-signal=INT"]  # a shell without job control has its background jobs ignore it
    with subprocess.Popen(
        [*heeding, sys.executable, "-m", "ddp_hpc", "submit", *words, "--follow"], stderr=subprocess.PIPE, text=True
    ) as follower:
        until(lambda: run.config.exists() and read_status(run, now=time.time()).step > 0)
        follower.send_signal(signal.SIGINT)
        _, said = follower.communicate(timeout=60)

    assert follower.returncode == 130
    assert "run continues without this command. Follow it: ddp-hpc logs -f run; stop it: ddp-hpc stop run" in said

    assert "is running already (attempt 0), so nothing was started" in submit(*words).stdout
    assert ddp_hpc("stop", "run").returncode == 0
    until(lambda: read_status(run, now=time.time()).state == "stopped")

    stopped_at = read_status(run, now=time.time()).last_checkpoint
    assert stopped_at
    first = read_environment(run, 0)
    assert first is not None
    write_environment(run, 0, replace(first, torch="1.0"))
    last = submit(*words, "recipe.args.pause_s=0.0", f"train.max_steps={stopped_at + 2}", "--wait", "--json")
    assert last.returncode == 0
    assert (json.loads(last.stdout)["state"], json.loads(last.stdout)["step"]) == ("finished", stopped_at + 2)
    assert f"changed: train.max_steps None -> {stopped_at + 2}" in last.stderr
    assert "not as in attempt 0, so results may differ: torch 1.0 -> 2." in run.console.read_text()
    second = read_environment(run, 1)
    assert second is not None
    assert second.torch.startswith("2.")


@pytest.mark.long
def test_fresh_starts_a_finished_run_over_and_keeps_what_there_was(here: Path) -> None:
    first = submit("run.yaml", "--wait")
    before = (here / "runs/run/metrics.jsonl").read_bytes()

    again = submit("run.yaml", "--wait")
    fresh = submit("run.yaml", "--wait", "--fresh", "train.lr=0.01")

    assert (first.returncode, again.returncode, fresh.returncode) == (0, 0, 0), fresh.stderr
    assert "Start it over with `--fresh`" in again.stdout
    assert f"the earlier run run was renamed to {here / 'runs/run.old-1'}" in fresh.stdout
    assert (here / "runs/run.old-1/metrics.jsonl").read_bytes() == before
    assert [entry.attempt for entry in Ledger.read(RunDir(here / "runs/run")).attempts] == [0]


@pytest.mark.long
def test_a_run_that_goes_on_keeps_its_precision_of_float32_and_says_so(here: Path) -> None:
    submit("run.yaml", "--wait", "train.matmul_precision=highest")

    again = submit("run.yaml", "--wait", "train.epochs=2")
    spec = ddp_hpc_load("run.yaml", {"train.epochs": 3})
    job = ddp_hpc_submit(replace(spec, train=replace(spec.train, matmul_precision=None)))

    assert "`train.matmul_precision` stays 'highest', as the run's checkpoint was trained" in again.stderr
    assert "changed: train.matmul_precision" not in again.stdout
    assert job.wait() == "finished"
    assert load_resolved(job.run.config).train.matmul_precision == "highest"


@pytest.mark.long
def test_a_changed_model_is_told_once_with_a_way_on(here: Path) -> None:
    submit("run.yaml", "--wait")
    (here / "tiny.py").write_text(RECIPE.replace("super().__init__(4, 2)", "super().__init__(4, 3)"))

    again = submit("run.yaml", "--wait", "train.epochs=2")

    assert again.returncode != 0
    assert (again.stdout + again.stderr).count("weight (2, 4) instead of (3, 4)") == 1
    assert "`ddp-hpc submit --fresh`" in again.stderr


def test_ctrl_c_while_a_submission_works_says_that_the_run_may_have_been_started(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ddp_hpc.launch.submission.local.subprocess.Popen", interrupted)

    assert main(["submit", "run.yaml", "name=mine", "--cluster", "local"]) == 130

    assert "mine may have been started. Check it: ddp-hpc status mine\n" in capsys.readouterr().err
