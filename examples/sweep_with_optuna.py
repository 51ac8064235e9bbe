"""Search with Optuna: each trial is a point of a sweep. Kill this script at any moment, and start it again: it goes on.

    python sweep_with_optuna.py digits.yaml train.epochs=10

What follows the script's name is what `ddp-hpc submit` gets, besides the points; also `-- python train.py --lr {lr}`.
"""

import fcntl
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import optuna
import yaml
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState

STUDY = "digits-search"
METRIC, DIRECTION = "accuracy", "maximize"
SPACE: dict[str, BaseDistribution] = {
    "train.lr": FloatDistribution(1e-3, 1.0, log=True),
    "optimizer.momentum": FloatDistribution(0.0, 0.98),
}
NUM_TRIALS, BATCH = 24, 8
POLL_S = 30.0
SETTLED_S = 60.0  # so long may a shared file system show the numbers of before
RUNS = Path("runs")
IS_OVER = {"finished", "failed", "refused", "cancelled"}
"""The states of a run that does not come back. A preempted one is `waiting`, and then `running` again."""


def main() -> None:
    with Path(f"{STUDY}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of these scripts at a time; a second one waits here
        study = optuna.create_study(
            study_name=STUDY, storage=f"sqlite:///{STUDY}.db", direction=DIRECTION, load_if_exists=True
        )
        # Nothing is remembered but what Optuna, the files of points and the runs say, so a new start needs no other code.
        while True:
            running = running_trials(study)
            if not running:
                num_begun = sum(trial.state != TrialState.WAITING for trial in study.trials)
                left = min(BATCH, NUM_TRIALS - num_begun)
                if left <= 0:
                    break
                for _ in range(left):
                    study.ask(SPACE)
                continue
            write_points(running)
            for sweep, names in sweeps().items():
                if names & running.keys():
                    tell(study, running, points_of(sweep, lock))
            time.sleep(POLL_S)
    for trial in study.best_trials:
        print(f"best: trial-{trial.number:05} {trial.value:g} {trial.params}")


def running_trials(study: optuna.Study) -> dict[str, FrozenTrial]:
    """Return the trials that Optuna waits for, by the names of their runs."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    for trial in trials:
        if trial.params.keys() != SPACE.keys():  # this script was killed while it asked for them
            study.tell(trial.number, state=TrialState.FAIL)
    return {f"trial-{trial.number:05}": trial for trial in trials if trial.params.keys() == SPACE.keys()}


def sweeps() -> dict[str, set[str]]:
    """Return the names of the points of each sweep."""
    files = sorted(Path().glob(f"{STUDY}-trial-*.yaml"))
    return {file.stem: {point["name"] for point in yaml.safe_load(file.read_text())} for file in files}


def write_points(running: dict[str, FrozenTrial]) -> None:
    """Write the points of the next sweep: the trials that no sweep has. The points of a sweep never change."""
    known: set[str] = set().union(*sweeps().values())
    points = [
        {"name": name, "env.TRIAL": str(trial.number), **trial.params}  # TRIAL: two points cannot set the very same
        for name, trial in running.items()
        if name not in known
    ]
    if points:
        file = Path(f"{STUDY}-{points[0]['name']}.yaml")
        file.with_suffix(".tmp").write_text(yaml.safe_dump(points, sort_keys=False))
        file.with_suffix(".tmp").replace(file)  # whole, or not at all


def points_of(sweep: str, lock: TextIO) -> list[dict[str, Any]]:
    """Return the state of each point of a sweep, which is submitted if it is not yet."""
    ledger = RUNS / sweep / "sweep.jsonl"
    if not ledger.exists():  # without Slurm, this runs the points, and its exit code says how they have ended
        done = ddp_hpc("submit", f"name={sweep}", "--points", f"{sweep}.yaml", *sys.argv[1:], lock=lock)
        if not ledger.exists():
            done.check_returncode()
    listed = ddp_hpc("list", sweep, "--json", lock=lock, stdout=subprocess.PIPE)
    if listed.returncode:  # the file system or Slurm does not answer now: ask again later
        return []
    points: list[dict[str, Any]] = json.loads(listed.stdout)
    if any(point["state"] in {"not submitted", "interrupted", "stopped"} for point in points):
        # A limit of Slurm's has left them, or this script was killed, or Ctrl-C has stopped it. A point that the user has stopped alone is
        # not started.
        ddp_hpc("sweep", "continue", sweep, lock=lock, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return points


def ddp_hpc(verb: str, *words: str, lock: TextIO, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command. It has the lock, too: if this script is killed meanwhile, the next one waits for the command's end."""
    argv = ["ddp-hpc", verb, "--runs-dir", str(RUNS), *words]
    return subprocess.run(argv, text=True, check=False, pass_fds=[lock.fileno()], **options)


def tell(study: optuna.Study, running: dict[str, FrozenTrial], points: list[dict[str, Any]]) -> None:
    """Tell Optuna of the trials that are over."""
    for point in points:
        if point["run"] not in running or point["state"] not in IS_OVER:
            continue
        if point["age_s"] is not None and point["age_s"] < SETTLED_S:
            continue
        number, value = running[point["run"]].number, point["metrics"].get(METRIC)
        if point["state"] == "finished" and value is not None:
            study.tell(number, value, skip_if_finished=True)
        else:
            study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
        print(f"{point['run']}: {point['state']}, {METRIC} {value}", flush=True)


if __name__ == "__main__":
    main()
