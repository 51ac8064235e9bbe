"""The example with Optuna: killed in the middle of a search, with a point preempted meanwhile, it ends with no trial lost or twice trained."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from ddp_hpc.run_dir.ledger import Ledger
from ddp_hpc.run_dir.paths import RunDir
from tests.distributed.test_scripts import ENVIRON, Place, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep_with_optuna.py"
CHANGED = {
    'STUDY = "digits-search"': 'STUDY = "search"',
    'METRIC, DIRECTION = "accuracy", "maximize"': 'METRIC, DIRECTION = "error", "minimize"',
    '    "train.lr": FloatDistribution(1e-3, 1.0, log=True),\n': '    "x": FloatDistribution(-1.0, 1.0, step=1.0),\n',
    '    "optimizer.momentum": FloatDistribution(0.0, 0.98),\n': "",
    "NUM_TRIALS, BATCH = 24, 8": "NUM_TRIALS, BATCH = 8, 4",
    "POLL_S = 30.0": "POLL_S = 0.2",
}
"""What a user changes at the example's top. Four trials get the same of three values at least once."""
NUM_STEPS = 6
SCRIPT = f"""
import os, sys, time
from pathlib import Path
from ddp_hpc import attach

name, x = sys.argv[1], float(sys.argv[2])
run = attach()
latest = run.latest()
step = 0 if latest is None else int((latest / "step").read_text())
while step < {NUM_STEPS}:
    step += 1
    with open("trained", "a") as file:
        file.write(f"{{name}} {{step}}\\n")
    if name == "trial-00003":
        sys.exit("this trial fails")
    while name == "trial-00002" and step == 3 and not run.should_stop(step) and run.attempt == 0:
        time.sleep(0.02)
    while name == "trial-00001" and not Path("go").exists():
        time.sleep(0.02)
    run.report(step, error=x * x)
    if run.should_stop(step) or step == {NUM_STEPS}:
        folder = run.checkpoint_dir / f"step-{{step}}.tmp"
        folder.mkdir(exist_ok=True)
        (folder / "step").write_text(str(step))
        run.commit(folder)
    if run.should_stop(step):
        run.exit_for_requeue()
"""
WORDS = ("--cluster", "local", "--at-most", "2", "resources.workers_per_node=1", "--", "python", "train.py", "{point}")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    text = EXAMPLE.read_text()
    for old, new in CHANGED.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "search.py").write_text(text)
    (tmp_path / "train.py").write_text(SCRIPT)
    yield Place(tmp_path)
    for ledger in tmp_path.glob("runs/*/sweep.jsonl"):  # nothing runs on where the test has failed
        Place(tmp_path).ddp_hpc("sweep", "cancel", ledger.parent.name)


def search(place: Place) -> subprocess.Popen[bytes]:
    """Start the example, as a user does."""
    environ = {**ENVIRON, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{ENVIRON['PATH']}"}
    with (place.path / "search.log").open("ab") as log:
        argv = [sys.executable, "-W", "error", "search.py", *WORDS, "{x}"]
        return subprocess.Popen(argv, cwd=place.path, env=environ, stdout=log, stderr=log)


def study_of(place: Place) -> optuna.Study:
    return optuna.load_study(study_name="search", storage=f"sqlite:///{place.path / 'search.db'}")


def is_over(run: RunDir) -> bool:
    newest = Ledger.read(run).newest
    return newest is not None and newest.is_last


def trained(place: Place) -> list[str]:
    file = place.path / "trained"
    return file.read_text().splitlines() if file.exists() else []


def test_a_search_that_is_killed_and_started_again_tells_optuna_of_each_trial_and_trains_none_twice(
    place: Place,
) -> None:
    first = "search-trial-00000"
    runs = [place.run(f"{first}/trial-{number:05}") for number in range(4)]
    driver = search(place)
    until(lambda: "trial-00002 3" in trained(place))
    driver.kill()
    driver.wait()
    (script,) = place.script_processes(f"{first}/trial-00002")
    script.terminate()  # as in a preemption; it saves, and asks to be started again
    until(lambda: is_over(runs[2]))
    until(lambda: is_over(runs[3]))
    waiting = (
        study_of(place).ask({"x": FloatDistribution(-1.0, 1.0, step=1.0)}).number
    )  # as if killed after it has asked
    states = [trial.state for trial in study_of(place).trials]
    assert states[1:] == [TrialState.RUNNING] * waiting
    (place.path / "go").touch()

    driver = search(place)
    code = driver.wait(timeout=300)

    assert code == 0, (place.path / "search.log").read_text()
    trials = study_of(place).trials
    states = [trial.state for trial in trials]
    assert states == [TrialState.FAIL if number == 3 else TrialState.COMPLETE for number in range(8)]
    assert [trial.value for trial in trials if trial.value is not None] == [
        trial.params["x"] ** 2 for trial in trials if trial.number != 3
    ]
    steps = {f"trial-{number:05} {step}" for number in range(8) for step in range(1, NUM_STEPS + 1)}
    steps -= {f"trial-00003 {step}" for step in range(2, NUM_STEPS + 1)}
    assert Counter(trained(place)) == dict.fromkeys(steps, 1)
    assert [attempt.cause for attempt in Ledger.read(runs[2]).attempts] == ["script asked", "finished"]
    assert sorted(path.parent.name for path in place.path.glob("runs/*/sweep.jsonl")) == [
        first,
        f"search-trial-{waiting:05}",
        f"search-trial-{waiting + 1:05}",
    ]
