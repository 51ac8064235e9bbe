"""The example with Optuna: killed in the middle of a search, with a point preempted meanwhile, it ends with no trial lost or twice trained."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import TrialState

from ddp_hpc.run.run_dir.ledger import Ledger
from ddp_hpc.run.run_dir.paths import RunDir
from tests.distributed.test_scripts import ENVIRON, Place, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "sweep_with_optuna.py"
CHANGED = {
    'STUDY = "digits-search"': 'STUDY = "search"',
    'METRIC, DIRECTION = "accuracy", "maximize"': 'METRIC, DIRECTION = "error", "minimize"',
    '    "train.lr": FloatDistribution(1e-3, 1.0, log=True),\n': '    "x": FloatDistribution(-1.0, 1.0, step=1.0),\n',
    '    "optimizer.momentum": FloatDistribution(0.0, 0.98),\n': "",
    "NUM_TRIALS, BATCH = 24, 8": "NUM_TRIALS, BATCH = 8, 4",
    "POLL_S = 30.0": "POLL_S = 0.2",
    "SETTLED_S = 60.0": "SETTLED_S = 0.0",
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

FAKE = """
import json, sys, time, yaml
from pathlib import Path

verb, _, runs, name, *words = sys.argv[1:]
sweep = Path(runs, name.removeprefix("name="))
with open("calls", "a") as file:
    file.write(f"{verb} {sweep.name}\\n")
if verb == "submit":
    time.sleep(0.3)  # so that the script is killed meanwhile, too
    points = yaml.safe_load(Path(words[1]).read_text())
    sweep.mkdir(parents=True)
    (sweep / "points").write_text(json.dumps(points))
    (sweep / "sweep.jsonl").touch()
elif verb == "list":
    points = json.loads((sweep / "points").read_text())
    ended = {"state": "finished", "age_s": 0.0}
    print(json.dumps([{"run": one["name"], "metrics": {"error": one["x"]}, **ended} for one in points]))
"""
"""A `ddp-hpc` whose points finish at once."""


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


def search(place: Place, commands: Path = Path(sys.executable).parent) -> subprocess.Popen[bytes]:
    """Start the example, as a user does, with the `ddp-hpc` of a directory."""
    environ = {**ENVIRON, "PATH": f"{commands}{os.pathsep}{ENVIRON['PATH']}"}
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


def num_lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def num_trials(place: Place) -> int:
    """Return how many trials the database has, also while Optuna makes its tables."""
    if not (place.path / "search.db").exists():
        return 0
    with closing(sqlite3.connect(f"file:{place.path / 'search.db'}?mode=ro", uri=True, timeout=30)) as database:
        try:
            return int(database.execute("SELECT count(*) FROM trials").fetchone()[0])
        except sqlite3.OperationalError:
            return 0


def test_a_search_that_is_killed_again_and_again_submits_each_trial_once(place: Place) -> None:
    fake = place.path / "bin" / "ddp-hpc"
    fake.parent.mkdir()
    fake.write_text(f"#!{sys.executable}{FAKE}")
    fake.chmod(0o755)
    calls = place.path / "calls"
    chance, codes = random.Random(0), [-signal.SIGKILL]
    while codes[-1] == -signal.SIGKILL:
        driver = search(place, fake.parent)
        # Soon after it has asked for a trial, and soon after it has called a command, in turn.
        look = partial(num_trials, place) if len(codes) % 2 else partial(num_lines, calls)
        before = look()
        while look() == before and driver.poll() is None:
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 0.4))
        driver.kill()
        codes.append(driver.wait())

    assert codes[-1] == 0, (place.path / "search.log").read_text()
    assert len(codes) >= 6
    states = [trial.state for trial in study_of(place).trials]
    halves = [trial for trial in study_of(place).trials if trial.state == TrialState.FAIL]
    assert len(states) == 8
    assert all(trial.params == {} for trial in halves)  # it was killed before Optuna had chosen a value
    assert states.count(TrialState.COMPLETE) == 8 - len(halves)
    submitted = [line for line in calls.read_text().splitlines() if line.startswith("submit")]
    assert len(submitted) == len(set(submitted)) == len(list(place.path.glob("runs/*/sweep.jsonl")))
    points = [one["name"] for file in place.path.glob("runs/*/points") for one in json.loads(file.read_text())]
    assert sorted(points) == [f"trial-{n:05}" for n, state in enumerate(states) if state == TrialState.COMPLETE]
